"""Attention as a fused kernel of a GPU keeps it for the backward pass, for fake tensors, which never reach a GPU."""

import contextlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

_plain = F.scaled_dot_product_attention


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        sums = torch.empty(q.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, _, _ = ctx.saved_tensors
        of_mask = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_mask


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if not torch.backends.cuda.mem_efficient_sdp_enabled():  # TRPO's second derivatives: plain products
        return _plain(q, k, v, attn_mask, *args, **kwargs)
    result: Tensor = _Fused.apply(q, k, v, attn_mask)  # type: ignore[no-untyped-call]
    return result


def fused_attention() -> contextlib.AbstractContextManager[Any]:
    """Context in which torch's attention takes the memory that it takes on a GPU."""
    return mock.patch.object(F, "scaled_dot_product_attention", _attention)
