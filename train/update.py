"""One optimizer step over micro-batches and ranks, and the schedule of the learning rate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algorithms.masked import mean_and_std, moments
from train.batches import Rollout
from train.distributed import Ranks

Sums = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Step:
    """stats: this rank's {name: (sum, count)} over the step's tokens. grad_norm: joint norm before clipping; None if
    the step was not taken. stopped: because the KL to the sampling policy was over its limit."""

    stats: Sums
    grad_norm: float | None
    stopped: bool = False


def add_sums(total: Sums, new: Sums) -> None:
    """total += new, name by name."""
    for name, (value, count) in new.items():
        old_value, old_count = total.get(name, (0.0, 0))
        total[name] = (old_value + value, old_count + count)


def optimizer_step(
    loss: Callable[[Rollout], tuple[Tensor, Sums]],
    micro_batches: Sequence[Rollout],
    model: Any,
    optimizer: Any,
    ranks: Ranks,
    *,
    max_grad_norm: float,
    kl_limit: float | None = None,
    count: Callable[[Rollout], Tensor] = lambda part: part.loss_mask.sum(),
    still: str | None = None,
) -> Step:
    """One step on the loss summed over all micro-batches and ranks, divided by their summed `count` (of tokens).

    `loss(micro_batch)` returns (loss_sum, stats). Where nothing counts, no step is taken. With `kl_limit`, all ranks
    together skip the step when the mean policy/approx_kl exceeds it. `still`: see `Ranks.step`. Raises
    FloatingPointError, before anything changes, if the gradient is not finite.
    """
    total = float(ranks.sum(torch.stack([count(part).float() for part in micro_batches]).sum()))
    stats: Sums = {}

    def over_limit() -> bool:
        return kl_limit is not None and ranks.mean({"kl": stats["policy/approx_kl"]})["kl"] > kl_limit

    look_first = kl_limit is not None and len(micro_batches) > 1 and not ranks.strategy.can_discard
    if total == 0 or look_first:
        with torch.no_grad():
            for part in micro_batches:
                add_sums(stats, loss(part)[1])
        if total == 0 or over_limit():
            return Step(stats, None, stopped=total > 0)
        stats = {}
    for i, part in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with ranks.accumulating(model, last):
            loss_sum, new = loss(part)
            add_sums(stats, new)
            if last and not look_first and over_limit():
                if ranks.strategy.can_discard:
                    optimizer.zero_grad()
                return Step(stats, None, stopped=True)
            ranks.backward(model, loss_sum, total, last)
    return Step(stats, ranks.step(model, optimizer, max_grad_norm, still))


def lr_factor(iteration: int, n_iters: int, schedule: str, warmup: int) -> float:
    """Multiplier of the learning rates in `iteration` (1-based): a function of it alone, nothing to save."""
    if iteration <= warmup:
        return iteration / warmup
    progress = (iteration - 1 - warmup) / max(1, n_iters - warmup)
    return {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[schedule]


def set_learning_rates(optimizer: Any, factor: float) -> None:
    """Every group's rate becomes `factor` times its base rate."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["base_lr"]


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, ranks: Ranks) -> float:
    """1 - Var(returns - values) / Var(returns) over all ranks; 0 where the returns do not vary."""
    totals = ranks.sum(torch.stack([moments(returns - values, mask), moments(returns, mask)]))
    (_, error), (_, spread) = (mean_and_std(total, unbiased=False) for total in totals)
    return float(1 - (error / spread) ** 2) if spread > 0 else 0.0
