"""What a language model does, found out by running it once on two tokens rather than by a list of families."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from algorithms.forward import Head, Inputs, decoder_inputs, trunk_states


def _inputs(lm: PreTrainedModel, ids: Tensor) -> Inputs:
    """`ids` [B, L] for the part that predicts; an encoder gets the first row, whatever the decoder reads."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if lm.config.is_encoder_decoder:
        inputs |= {"input_ids": ids[:1].repeat(len(ids), 1), **decoder_inputs(ids)}
    return inputs


@contextmanager
def _evaluating(lm: PreTrainedModel) -> Iterator[None]:
    was_training = lm.training
    lm.eval()
    try:
        yield
    finally:
        lm.train(was_training)


@torch.no_grad()
def check_causal(lm: PreTrainedModel) -> None:
    """Raises ValueError if a later token changes what an earlier one predicts, as in BERT without is_decoder."""
    ids = torch.tensor([[0, 1], [0, 0]], device=lm.device)
    with _evaluating(lm):
        first = lm(**_inputs(lm, ids), use_cache=False).logits[:, 0]
    rounding = 1e-5 if first.dtype == torch.float32 else 1e-2
    if (first[0] - first[1]).abs().max() > rounding * first.abs().max():
        raise ValueError(f"{type(lm).__name__} is not causal: its tokens attend to later ones")


class _AttentionMasks(TorchFunctionMode):
    """Notes in the context whether any attention gets a mask that has a gradient."""

    trained = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            self.trained |= mask is not None and mask.requires_grad
        return func(*args, **kwargs)


@torch.enable_grad()
def trains_attention_bias(lm: PreTrainedModel) -> bool:
    """Whether attention adds a bias with a gradient, as T5's for relative positions: see `same_attention_kernel`."""
    masks = _AttentionMasks()
    with _evaluating(lm), masks:
        lm(**_inputs(lm, torch.arange(2, device=lm.device)[None]), use_cache=False)
    return masks.trained


@contextmanager
def _scaled_inputs(head: nn.Module, scale: float) -> Iterator[None]:
    hook = head.register_forward_pre_hook(lambda module, args: (args[0] * scale, *args[1:]))
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def find_head(lm: PreTrainedModel) -> Head | None:
    """The `Head` that gives the model's own logits, seen by running both on two tokens. None: the model does more.

    The head gets states a thousand times too large, because soft-capping hardly changes the small logits of a fresh
    model, and then zeros, where a bias stands alone.
    """
    head, seq2seq = lm.get_output_embeddings(), lm.config.is_encoder_decoder
    if head is None or (lm.base_model is lm and not seq2seq):
        return None
    inputs = _inputs(lm, torch.arange(2, device=lm.device)[None])
    with _evaluating(lm):
        try:
            states = trunk_states(lm.base_model, inputs, kept=2)
        except (AttributeError, TypeError):
            return None  # encoder or decoder of a kind that is called in another way
        biases = [None, "final_logits_bias"] if hasattr(lm, "final_logits_bias") else [None]
        found = [Head(*kind) for kind in product((1.0, states.shape[-1] ** -0.5), biases)]
        for scale in (1000.0, 0.0):
            with _scaled_inputs(head, scale):
                whole = lm(**inputs, use_cache=False).logits
                found = [kind for kind in found if _close(kind.logits(lm, states), whole)]
    return found[0] if found else None


def _close(parts: Tensor, whole: Tensor) -> bool:
    return whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-4, atol=1e-5)
