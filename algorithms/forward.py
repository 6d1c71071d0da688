"""From tokens to states to logits and values: teacher-forced forwards of causal models and of encoder-decoders."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

Inputs = dict[str, Tensor]
"""Keyword arguments of a model's forward: those with "decoder_input_ids" are an encoder-decoder's."""


@dataclass(frozen=True)
class Head:
    """How logits follow from a trunk's states: head(factor · states) + bias.

    factor: not 1 in T5 with tied embeddings. bias: the model's buffer that is added, as in BART, or None.
    """

    factor: float = 1.0
    bias: str | None = None

    def logits(self, lm: PreTrainedModel, states: Tensor) -> Tensor:
        """[..., H] → [..., V]."""
        logits: Tensor = lm.get_output_embeddings()(states if self.factor == 1 else states * self.factor)
        return logits if self.bias is None else logits + getattr(lm, self.bias)


class ValueHead(nn.Linear):
    """From states [..., H] to values [..., 1], in float32 even where an engine has cast its weight with all others.

    Its weight starts at zero.
    """

    def __init__(self, state_size: int, device: torch.device) -> None:
        super().__init__(state_size, 1, bias=False, dtype=torch.float32, device=device)
        nn.init.zeros_(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.float(), self.weight.float())


@contextmanager
def same_attention_kernel() -> Iterator[None]:
    """Scaled dot-product attention without the kernels that give no gradient to a bias.

    PyTorch would take them in forwards without gradients and others in those with: results that differ in the last
    digits, so that PPO's first ratio is not exactly 1. A choice made around this one still holds.
    """
    efficient = [SDPBackend.EFFICIENT_ATTENTION] if torch.backends.cuda.mem_efficient_sdp_enabled() else []
    with sdpa_kernel([*efficient, SDPBackend.MATH]):
        yield


def start_token(lm: PreTrainedModel, given: int | None, vocab_size: int) -> int | None:
    """What a decoder reads before the first token of a response; None for a causal model."""
    if not lm.config.is_encoder_decoder:
        return None
    token = getattr(lm.config, "decoder_start_token_id", None) if given is None else given
    if token is None:
        raise ValueError(
            f"{type(lm).__name__} has no decoder_start_token_id in its config.json: set env.args.context_start_token "
            "to the id of the token that its decoder reads first"
        )
    if not 0 <= token < vocab_size:
        raise ValueError(f"decoder start token {token} is outside the model's vocabulary of {vocab_size}")
    return int(token)


def decoder_inputs(ids: Tensor) -> Inputs:
    """What the decoder of an encoder-decoder reads, int64 [B, L], none of it hidden."""
    return {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}


def trunk_states(trunk: Any, inputs: Inputs, kept: int) -> Tensor:
    """Hidden states [B, kept, H] of the last tokens; of an encoder-decoder those of the decoder, after one encoding.

    trunk: a pretrained model without a head, or one with encoder, decoder and head side by side, as T5: its head does
    not run.
    """
    if "decoder_input_ids" not in inputs or trunk.get_output_embeddings() is None:
        out = trunk(**inputs, use_cache=False)
    else:
        prompt_mask = inputs["attention_mask"]
        encoded = trunk.get_encoder()(input_ids=inputs["input_ids"], attention_mask=prompt_mask)
        out = trunk.get_decoder()(
            input_ids=inputs["decoder_input_ids"],
            attention_mask=inputs["decoder_attention_mask"],
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=prompt_mask,
            use_cache=False,
        )
    states: Tensor = out.last_hidden_state[:, -kept:]
    return states


def states_and_logits(lm: PreTrainedModel, inputs: Inputs, kept: int) -> tuple[Tensor, Tensor]:
    """States [B, kept, H] and logits [B, kept, V] of the last tokens, from the model's own forward."""
    is_seq2seq = "decoder_input_ids" in inputs
    narrow = {} if is_seq2seq else {"logits_to_keep": kept}
    out = lm(**inputs, use_cache=False, output_hidden_states=True, **narrow)
    states = out.decoder_hidden_states[-1] if is_seq2seq else out.hidden_states[-1]
    return states[:, -kept:], out.logits[:, -kept:]
