"""The policy and its critic in one module, the frozen reference, and the one forward pass that scores responses."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from algorithms.forward import (
    Inputs,
    ValueHead,
    decoder_inputs,
    same_attention_kernel,
    start_token,
    states_and_logits,
    trunk_states,
)
from algorithms.logprobs import token_logprobs
from algorithms.packing import unpack_mask
from algorithms.padding import join, positions, takes_position_ids, to_right
from algorithms.probes import check_causal, find_head, trains_attention_bias


@dataclass(kw_only=True)
class Scores:
    """What one teacher-forced forward gives. float32; positions outside response_mask hold 0.

    logprobs [B, T]: of the sampled tokens under the distribution they were sampled from (temperature, action mask).
    raw_logprobs [B, T]: the same without the action mask, for the KL to the reference.
    entropy [B, T]: of the restricted distribution.
    states [B, T+1, H]: hidden states before each token, and after the last. values [B, T+1]: the critic's,
    or None of a policy without values.
    """

    logprobs: Tensor
    entropy: Tensor
    raw_logprobs: Tensor
    states: Tensor | None = None
    values: Tensor | None = None


class LanguageModel(nn.Module):
    """A language model, causal or sequence-to-sequence, that scores given responses: the policy or the reference.

    The trunk runs once over prompt and response (an encoder once over the prompt, its decoder once over the response);
    the head runs on counted response positions only, a chunk at a time. Families whose head does more than `Head`
    (soft-capping) are found by comparing once and take the slower path through the model's own forward.

    agree: from a number of this process, such as its calls of the head, to the one that all ranks take: the largest of
    all where ranks hold parts of the weights and so have to go in step. As it is made, each goes alone.

    start_token_id: what the decoder of a sequence-to-sequence model reads first; None for a causal model. It is
    `decoder_start_token_id`, or else that of the model's config; ValueError where both lack it.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        decoder_start_token_id: int | None = None,
        logits_chunk_mb: int = 256,
        original_config: PretrainedConfig | None = None,
    ) -> None:
        super().__init__()
        self.lm = freeze_tables(lm)
        self.original_config = original_config or lm.config
        weight = lm.get_output_embeddings().weight
        self.vocab_size: int = weight.shape[0]  # the logits' width, not the tokenizer's size
        self.start_token_id = start_token(lm, decoder_start_token_id, self.vocab_size)
        self.needs_positions = self.start_token_id is None and takes_position_ids(lm)
        self.head = find_head(lm)
        check_causal(lm)
        self.attention = same_attention_kernel if trains_attention_bias(lm) else contextlib.nullcontext
        own_size = lm.config.get_text_config(decoder=True).hidden_size  # not that of OPT-350m's states
        self.state_size: int = own_size if self.head is None else weight.shape[1]
        self.logits_chunk_bytes = logits_chunk_mb * 2**20
        self.agree: Callable[[int], int] = int

    def inputs(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor) -> Inputs:
        """Arguments for a forward of this model, or of its critic, whose last T+1 states are those of a response.

        A sequence-to-sequence model gets its prompt padded on the right. Its decoder's mask hides nothing: what comes
        after a response is seen by nothing that counts, and T5Gemma would hide each padding token, even a sampled one.
        """
        if self.start_token_id is None:
            ids, mask = join(prompt_ids, prompt_mask, response_ids)
            place = {"position_ids": positions(mask)} if self.needs_positions else {}
            return {"input_ids": ids, "attention_mask": mask, **place}
        ids, mask = to_right(prompt_ids, prompt_mask)
        decoder_ids = nn.functional.pad(response_ids, (1, 0), value=self.start_token_id)
        return {"input_ids": ids, "attention_mask": mask, **decoder_inputs(decoder_ids)}

    def run(
        self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """(states [B, T+1, H], rows [B, T+1, ·], head): `head(rows)` are the logits of what follows each state."""
        inputs, kept = self.inputs(prompt_ids, prompt_mask, response_ids), response_ids.shape[1] + 1
        with self.attention():
            if self.head is None:
                return *states_and_logits(self.lm, inputs, kept), nn.Identity()
            states = trunk_states(self.lm.base_model, inputs, kept)
        return states, states, partial(self.head.logits, self.lm)

    def token_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor
    ) -> Tensor:
        """float32 [N, V]: the logits that each counted token was chosen by, row-major; all of them are held at once."""
        _, rows, head = self.run(prompt_ids, prompt_mask, response_ids)
        return head(rows[:, :-1][response_mask.nonzero(as_tuple=True)]).float()

    def forward(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        response_ids: Tensor,
        response_mask: Tensor,
        *,
        temperature: float = 1.0,
        action_mask: Tensor | None = None,
        unrestricted: bool = False,
    ) -> Scores:
        """Scores of given responses, with states and without values; raw_logprobs are right only if `unrestricted`.

        prompt_ids, prompt_mask: [B, P] left-padded. response_ids, response_mask: [B, T] right-padded; only positions in
        response_mask are scored. action_mask: packed [B, T, ceil(V/8)], the tokens sampling allowed, or None.
        """
        states, rows, head = self.run(prompt_ids, prompt_mask, response_ids)
        counted = response_mask.nonzero(as_tuple=True)
        packed = None if action_mask is None else action_mask[counted]
        chunk = self.chunk_rows()
        results = token_logprobs(
            rows[:, :-1][counted],
            response_ids[counted],
            head,
            temperature=temperature,
            mask=None if packed is None else lambda part: unpack_mask(packed[part], self.vocab_size),
            chunk=chunk,
            calls=self.agree(max(1, -(-len(counted[0]) // chunk))),
            unrestricted=unrestricted,
        )
        blank = torch.zeros(response_ids.shape, dtype=torch.float32, device=response_ids.device)
        logp, entropy, raw = (blank.index_put(counted, x) for x in results)
        return Scores(logprobs=logp, entropy=entropy, raw_logprobs=raw, states=states)

    def save_pretrained(self, folder: str | os.PathLike[str], state: Mapping[str, Tensor] | None = None) -> None:
        """Writes the model for `from_pretrained`, with the dropout rates that its config had.

        state: the state dict of `lm`, where it is in parts that this process does not have.
        """
        assert not hasattr(self.lm, "peft_config"), "algorithms.adapters.save_pretrained writes adapters"
        ours, self.lm.config = self.lm.config, self.original_config
        try:
            self.lm.save_pretrained(folder, state_dict=None if state is None else dict(state))
        finally:
            self.lm.config = ours

    def chunk_rows(self) -> int:
        """Rows of fp32 logits that fit in logits_chunk_mb. Without gradients, on CPU, small chunks are faster: the
        allocator gives the same pages again."""
        limit = self.logits_chunk_bytes
        if not torch.is_grad_enabled() and self.lm.device.type == "cpu":
            limit = min(limit, 16 * 2**20)
        return max(1, limit // (4 * self.vocab_size))


class ActorCritic(nn.Module):
    """Policy and critic in one module, so that one engine, one optimizer and one gradient clip serve both.

    `critic` is a model of its own without an LM head (RL4LMs' way), or None: then the value head reads the policy's
    hidden states. The value head starts at zero, so that the first advantages are the rewards alone. With
    `values=False` there is neither critic nor value head, for algorithms that need no values.
    """

    def __init__(self, policy: LanguageModel, critic: PreTrainedModel | None = None, *, values: bool = True) -> None:
        super().__init__()
        if critic is not None and not values:
            raise ValueError("a critic is given, but values=False: leave out one of them")
        self.policy, self.critic = policy, None if critic is None else freeze_tables(critic)
        self.value_head: ValueHead | None = None
        if values:
            self.value_head = ValueHead(policy.state_size, policy.lm.get_output_embeddings().weight.device)

    def forward(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        response_ids: Tensor,
        response_mask: Tensor,
        *,
        critic_only: bool = False,
        **sampling: Any,
    ) -> Scores:
        """One forward of policy and critic over given responses; arguments as in `LanguageModel.forward`.

        critic_only: nothing but values, the rest holds 0; of a trunk shared with the policy only the value head gets a
        gradient. The way of a critic that is trained alone, since an engine works when it is called.
        """
        if critic_only:
            blank = torch.zeros(response_ids.shape, dtype=torch.float32, device=response_ids.device)
            values = self.values(prompt_ids, prompt_mask, response_ids)
            return Scores(logprobs=blank, entropy=blank, raw_logprobs=blank, values=values)
        scores: Scores = self.policy(prompt_ids, prompt_mask, response_ids, response_mask, **sampling)
        states, scores.states = scores.states, None
        if self.critic is not None:
            states = self.critic_states(prompt_ids, prompt_mask, response_ids)
        if self.value_head is not None and states is not None:
            scores.values = self.value_of(states)
        return scores

    def critic_states(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor) -> Tensor:
        """Hidden states [B, T+1, H] of the critic's own trunk."""
        inputs = self.policy.inputs(prompt_ids, prompt_mask, response_ids)
        with self.policy.attention():
            return trunk_states(self.critic, inputs, kept=response_ids.shape[1] + 1)

    def values(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor) -> Tensor:
        """The critic alone: float32 [B, T+1]. Of a trunk shared with the policy only the value head gets a gradient."""
        if self.critic is not None:
            states = self.critic_states(prompt_ids, prompt_mask, response_ids)
        else:
            with torch.no_grad():
                states, _, _ = self.policy.run(prompt_ids, prompt_mask, response_ids)
        return self.value_of(states)

    def value_of(self, states: Tensor) -> Tensor:
        """Values of hidden states, float32 [...] from [..., H], in whatever precision the trunk works."""
        assert self.value_head is not None
        values: Tensor = self.value_head(states).squeeze(-1)
        return values

    @contextlib.contextmanager
    def recomputing(self, enabled: bool) -> Any:
        """Gradient checkpointing in the context: transformers recomputes in train mode only (and dropout is 0)."""
        self.train(enabled)
        try:
            yield
        finally:
            self.eval()


def freeze_tables(model: PreTrainedModel) -> PreTrainedModel:
    """Without gradients for sinusoidal positions (Pegasus, Marian): `from_pretrained` makes the constants trainable."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and "Sinusoidal" in type(module).__name__:
            module.requires_grad_(False)
    return model
