"""The policy and its critic in one module, the frozen reference, and the one forward pass that scores responses."""

import contextlib
import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from algorithms.logprobs import token_logprobs
from algorithms.probes import check_causal, head_is_plain
from algorithms.sampling import positions, takes_position_ids, unpack_mask


@dataclass(kw_only=True)
class Scores:
    """What one teacher-forced forward gives. float32; positions outside response_mask hold 0.

    logprobs [B, T]: of the sampled tokens under the distribution they were sampled from (temperature, action mask).
    raw_logprobs [B, T]: the same without the action mask, for the KL to the reference.
    entropy [B, T]: of the restricted distribution.
    states [B, T+1, H]: hidden states before each token, and after the last. values [B, T+1]: the critic's.
    """

    logprobs: Tensor
    entropy: Tensor
    raw_logprobs: Tensor
    states: Tensor | None = None
    values: Tensor | None = None


def response_states(trunk: nn.Module, ids: Tensor, mask: Tensor, prompt_width: int, needs_positions: bool) -> Tensor:
    """Hidden states [B, T+1, H] at the last prompt token and at each response token: what tokens 0..T follow."""
    place = {"position_ids": positions(mask)} if needs_positions else {}
    out = trunk(input_ids=ids, attention_mask=mask, use_cache=False, **place)
    states: Tensor = out.last_hidden_state[:, prompt_width - 1 :]
    return states


class LanguageModel(nn.Module):
    """A causal language model that scores given responses. Used for the policy (trained) and the reference (frozen).

    The trunk runs once over prompt and response; the head runs on counted response positions only, a chunk at a time.
    Families whose head does more than multiply (soft-capping, scaling) are found by comparing once and take the
    slower path through the model's own forward.
    """

    def __init__(
        self, lm: PreTrainedModel, *, logits_chunk_mb: int = 256, original_config: PretrainedConfig | None = None
    ) -> None:
        super().__init__()
        self.lm = lm
        self.original_config = original_config or lm.config
        self.vocab_size: int = lm.get_output_embeddings().weight.shape[0]  # the logits' width, not the tokenizer's size
        self.needs_positions = takes_position_ids(lm)
        self.plain_head = head_is_plain(lm)
        check_causal(lm)
        self.logits_chunk_bytes = logits_chunk_mb * 2**20

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
        ids, mask = join(prompt_ids, prompt_mask, response_ids)
        if self.plain_head:
            states = response_states(self.lm.base_model, ids, mask, prompt_ids.shape[1], self.needs_positions)
            head, inputs = self.lm.get_output_embeddings(), states
        else:
            place = {"position_ids": positions(mask)} if self.needs_positions else {}
            kept = response_ids.shape[1] + 1
            out = self.lm(
                ids, attention_mask=mask, use_cache=False, output_hidden_states=True, logits_to_keep=kept, **place
            )
            states = out.hidden_states[-1][:, -kept:]
            head, inputs = nn.Identity(), out.logits[:, -kept:]
        counted = response_mask.nonzero(as_tuple=True)
        packed = None if action_mask is None else action_mask[counted]
        results = token_logprobs(
            inputs[:, :-1][counted],
            response_ids[counted],
            head,
            temperature=temperature,
            mask=None if packed is None else lambda rows: unpack_mask(packed[rows], self.vocab_size),
            chunk=self.chunk_rows(),
            unrestricted=unrestricted,
        )
        blank = torch.zeros(response_ids.shape, dtype=torch.float32, device=response_ids.device)
        logp, entropy, raw = (blank.index_put(counted, x) for x in results)
        return Scores(logprobs=logp, entropy=entropy, raw_logprobs=raw, states=states)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes the model for `from_pretrained`, with the dropout rates that its config had."""
        ours, self.lm.config = self.lm.config, self.original_config
        try:
            self.lm.save_pretrained(folder)
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
    hidden states. The value head starts at zero, so that the first advantages are the rewards alone.
    """

    def __init__(self, policy: LanguageModel, critic: PreTrainedModel | None) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic
        weight = policy.lm.get_output_embeddings().weight
        hidden_size = policy.lm.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(self.value_head.weight)

    def forward(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        response_ids: Tensor,
        response_mask: Tensor,
        **sampling: Any,
    ) -> Scores:
        """One forward of policy and critic over given responses; arguments as in `LanguageModel.forward`."""
        scores: Scores = self.policy(prompt_ids, prompt_mask, response_ids, response_mask, **sampling)
        states = scores.states
        if self.critic is not None:
            ids, mask = join(prompt_ids, prompt_mask, response_ids)
            states = response_states(self.critic, ids, mask, prompt_ids.shape[1], self.policy.needs_positions)
        scores.values = self.value_head(states).squeeze(-1).float()
        scores.states = None
        return scores

    @contextlib.contextmanager
    def recomputing(self, enabled: bool) -> Any:
        """Gradient checkpointing in the context: transformers recomputes in train mode only (and dropout is 0)."""
        self.train(enabled)
        try:
            yield
        finally:
            self.eval()


def join(prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Model input [B, P+T] and its attention mask.

    Padding after a response is marked as real: nothing that counts attends to what comes after it, and an unbroken mask
    lets attention take its fast causal path.
    """
    after = torch.ones_like(response_ids, dtype=prompt_mask.dtype)
    return torch.cat([prompt_ids, response_ids], 1), torch.cat([prompt_mask, after], 1)


_DROPOUT_NAMES = ("dropout", "pdrop", "drop_rate", "layerdrop")


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Set every dropout rate of a model config to 0: the ratio of PPO is 1 at the first minibatch only without it."""
    for name, value in vars(config).items():
        if isinstance(value, float) and any(word in name for word in _DROPOUT_NAMES):
            setattr(config, name, 0.0)
    return config


def load_language_model(
    model_name: str, *, dtype: torch.dtype = torch.float32, logits_chunk_mb: int = 256
) -> LanguageModel:
    """A causal language model from a local folder or a hub name, without dropout, in eval mode."""
    original = AutoConfig.from_pretrained(model_name)
    config = without_dropout(copy.deepcopy(original))
    lm = AutoModelForCausalLM.from_pretrained(model_name, config=config, dtype=dtype)
    return LanguageModel(lm.eval(), logits_chunk_mb=logits_chunk_mb, original_config=original)


def load_reference(model_name: str, *, dtype: torch.dtype = torch.float32, logits_chunk_mb: int = 256) -> LanguageModel:
    """The policy as it was at iteration 0, frozen. Loaded from disk again, never copied from the policy."""
    return load_language_model(model_name, dtype=dtype, logits_chunk_mb=logits_chunk_mb).requires_grad_(False)


def load_actor_critic(
    model_name: str,
    *,
    value_model: str = "separate",
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    logits_chunk_mb: int = 256,
) -> ActorCritic:
    """Policy and critic, both starting from `model_name`. value_model: "separate" (two trunks) or "shared" (one)."""
    policy = load_language_model(model_name, dtype=dtype, logits_chunk_mb=logits_chunk_mb)
    critic = None
    if value_model == "separate":
        config = without_dropout(AutoConfig.from_pretrained(model_name))
        critic = AutoModel.from_pretrained(model_name, config=config, dtype=dtype)
    for model in (policy.lm, critic) if gradient_checkpointing else ():
        if model is not None:
            model.activation_checkpointing_enable({"use_reentrant": False})
    return ActorCritic(policy, critic).eval()


def parameter_groups(
    model: ActorCritic, *, learning_rate: float, critic_learning_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Optimizer groups: {policy, critic} × {decayed, not decayed}. Biases and norm weights (fewer than two axes) are
    not decayed. Each group has "base_lr", which the schedule multiplies, and a "name"."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name.startswith("policy."), parameter.ndim > 1), []).append(parameter)
    return [
        {
            "name": f"{'policy' if is_policy else 'critic'}{'' if decayed else '_no_decay'}",
            "params": parameters,
            "lr": learning_rate if is_policy else critic_learning_rate,
            "base_lr": learning_rate if is_policy else critic_learning_rate,
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for (is_policy, decayed), parameters in sorted(groups.items(), reverse=True)
    ]
