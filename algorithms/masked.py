"""Statistics over the positions that count.

Every function takes a boolean mask (True = counts) and ignores what stands elsewhere, NaN and infinity included:
a masked value is replaced before any arithmetic, never multiplied by zero.
"""

import torch
from torch import Tensor

EPSILON = 1e-8


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` where `mask` is True. `x`, `mask`: same shape. Returns a scalar tensor."""
    return torch.where(mask, x, 0).sum()


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """(sum, sum of squares, count) of the masked values as float64 [3].

    Moments add up: sum them over minibatches or ranks, then hand the total to `whiten`.
    """
    kept = torch.where(mask, x, 0).double()
    return torch.stack([kept.sum(), (kept * kept).sum(), mask.sum().double()])


def mean_and_std(total: Tensor, *, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (float64 scalars) from summed `moments`. One value or none: the deviation is 0."""
    count = total[2].clamp(min=1)
    mean = total[0] / count
    squares = (total[1] - count * mean * mean).clamp(min=0)
    return mean, (squares / (count - int(unbiased)).clamp(min=1)).sqrt()


def whiten(x: Tensor, mask: Tensor, total: Tensor, *, unbiased: bool = True) -> Tensor:
    """(x - mean) / (std + 1e-8) at the masked positions, 0 elsewhere.

    `total` holds the moments of everything that shares the normalisation (all ranks, not just this one).
    """
    mean, std = mean_and_std(total, unbiased=unbiased)
    return torch.where(mask, ((torch.where(mask, x, 0) - mean) / (std + EPSILON)).to(x.dtype), 0)
