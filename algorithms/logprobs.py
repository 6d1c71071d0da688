"""Log-probabilities of chosen tokens, in fp32, without ever holding a [B, T, V] array in fp32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class _SelectiveLogSoftmax(torch.autograd.Function):
    """log softmax(z)[a] and the entropy of softmax(z), each row on its own, with a backward that allocates nothing.

    Autograd's own graph would keep four [N, V] arrays; this one keeps the exponentials and turns them into the
    gradient in place: d logp/dz = onehot - p,  dH/dz = -p·(log p + H).
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        chosen = z.gather(1, ids[:, None]).squeeze(1)
        shifted = z if mask is None else z.masked_fill(~mask, -torch.inf)
        top = shifted.amax(1, keepdim=True)
        shifted = shifted - top  # before any sum: large logits would cost digits
        exponentials = shifted.exp()
        total = exponentials.sum(1)
        log_total = total.log()
        # Excluded tokens give 0 · -inf, which nansum drops; a real NaN is still in log_total.
        entropy = log_total - shifted.mul_(exponentials).nansum(1) / total
        ctx.save_for_backward(ids, total, entropy, exponentials)
        return chosen - top.squeeze(1) - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, total, entropy, gradient = ctx.saved_tensors  # overwritten below: autograd refuses a second backward
        grad_logp, grad_entropy = grads
        scale = -grad_logp / total
        if grad_entropy.any():
            log_p = (gradient / total[:, None]).clamp_min_(torch.finfo(gradient.dtype).tiny).log_()
            weights = log_p.add_(entropy[:, None]).mul_((-grad_entropy / total)[:, None]).add_(scale[:, None])
            gradient.mul_(weights)
        else:
            gradient.mul_(scale[:, None])
        gradient.scatter_add_(1, ids[:, None], grad_logp[:, None])
        return gradient, None, None


def selective_log_softmax(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log π(ids), entropy of π), both float32 [N], for π = softmax(logits / temperature restricted to mask).

    logits: float [N, V]; ids: int64 [N]; mask: bool [N, V], True = allowed. One backward only.
    """
    z = logits.float()
    if temperature != 1.0:
        z = z / temperature
    results: tuple[Tensor, Tensor] = _SelectiveLogSoftmax.apply(z, ids, mask)  # type: ignore[no-untyped-call]
    return results


def token_logprobs(
    states: Tensor,
    ids: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    mask: Callable[[slice], Tensor] | None,
    chunk: int,
    calls: int = 1,
    unrestricted: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropies, raw logprobs), float32 [N], of tokens `ids` [N] that follow the hidden `states` [N, H].

    `head` maps states to logits; `mask(rows)` gives the allowed tokens of a slice of rows as bool [n, V]. The raw ones
    are without the mask, and computed only if `unrestricted`. At most `chunk` rows of logits exist at a time: with
    several chunks each is computed again in the backward pass. There are at least `calls` of them (1 or more), the last
    ones empty: a head whose weight lies in parts on the ranks has to be called equally often on each.
    """

    def part(rows: slice, some_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, some_ids = head(some_states), ids[rows]
        allowed = None if mask is None else mask(rows)
        logp, entropy = selective_log_softmax(logits, some_ids, temperature=temperature, mask=allowed)
        raw = logp
        if unrestricted and mask is not None:
            raw, _ = selective_log_softmax(logits, some_ids, temperature=temperature)
        return logp, entropy, raw

    pieces = [slice(i * chunk, (i + 1) * chunk) for i in range(max(calls, -(-len(states) // chunk)))]
    if len(pieces) > 1 and torch.is_grad_enabled():
        # There is no randomness to preserve.
        again = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
        results = [again(rows, states[rows]) for rows in pieces]
    else:
        results = [part(rows, states[rows]) for rows in pieces]
    logp, entropy, raw = (torch.cat(parts) for parts in zip(*results, strict=True))
    return logp, entropy, raw
