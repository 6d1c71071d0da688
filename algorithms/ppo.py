"""Proximal policy optimisation (Schulman et al. 2017) as functions over tensors.

A loss function returns `(loss_sum, stats)`: a SUM over response tokens, and {name: (sum, count)}. The caller divides by
the global number of tokens of the optimizer step, so neither micro-batches nor ranks change the result.
"""

import torch
from torch import Tensor

from algorithms.masked import masked_sum

Stats = dict[str, tuple[Tensor, Tensor]]


def policy_loss(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip_range: float
) -> tuple[Tensor, Stats]:
    """Clipped surrogate (eq. 7): -Σ min(A·ρ, A·clip(ρ, 1±ε)), ρ = exp(logprobs - old_logprobs). All [B, T]."""
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip_range, 1 + clip_range))
    loss = -masked_sum(surrogate, response_mask)
    with torch.no_grad():
        count = response_mask.sum()
        stats = {
            "loss/policy": (loss.detach(), count),
            "policy/approx_kl": (masked_sum(ratio - 1 - log_ratio, response_mask), count),
            "policy/clip_fraction": (masked_sum(((ratio - 1).abs() > clip_range).float(), response_mask), count),
            "policy/ratio": (masked_sum(ratio, response_mask), count),
        }
    return loss, stats


def max_ratio(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Largest ρ over the counted tokens, 0 for an empty mask (a maximum over ranks is then still right). Scalar."""
    with torch.no_grad():
        return torch.where(response_mask, (logprobs - old_logprobs).exp(), 0).max()


def value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, clip_range_vf: float | None = None
) -> tuple[Tensor, Stats]:
    """Squared error Σ (V_pred - R)², [B, T]; with `clip_range_vf` V_pred moves at most that far from `old_values`.

    As in Stable-Baselines3 there is no factor 1/2 and no maximum with the unclipped error.
    """
    predicted = values
    if clip_range_vf is not None:
        predicted = old_values + (values - old_values).clamp(-clip_range_vf, clip_range_vf)
    error = torch.where(response_mask, predicted - returns, 0)  # before the square: its gradient at NaN is NaN · 0
    loss = (error**2).sum()
    return loss, {"loss/value": (loss.detach(), response_mask.sum())}


def ppo_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    entropy: Tensor,
    values: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    clip_range: float,
    clip_range_vf: float | None,
    vf_coef: float,
    ent_coef: float,
) -> tuple[Tensor, Stats]:
    """L = L_policy + vf_coef·L_value - ent_coef·ΣH (eq. 9, signs for descent). Tensors [B, T]; returns (sum, stats)."""
    pg_loss, pg_stats = policy_loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        response_mask=response_mask,
        clip_range=clip_range,
    )
    vf_loss, vf_stats = value_loss(
        values=values,
        old_values=old_values,
        returns=returns,
        response_mask=response_mask,
        clip_range_vf=clip_range_vf,
    )
    entropy_sum = masked_sum(entropy, response_mask)
    loss = pg_loss + vf_coef * vf_loss - ent_coef * entropy_sum
    own = {
        "policy/entropy": (entropy_sum.detach(), response_mask.sum()),
        "loss/total": (loss.detach(), response_mask.sum()),
    }
    return loss, {**pg_stats, **vf_stats, **own}
