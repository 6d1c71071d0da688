"""Proximal policy optimisation (Schulman et al. 2017) as functions over tensors.

A loss function returns `(loss_sum, stats)`: a SUM over response tokens, and {name: (sum, count)}. The caller divides by
the global number of tokens of the optimizer step, so neither micro-batches nor ranks change the result.
"""

import torch
from torch import Tensor

from algorithms.masked import masked_sum

Stats = dict[str, tuple[Tensor, Tensor]]


def policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Stats]:
    """Clipped surrogate (eq. 7): -Σ min(A·ρ, A·clip(ρ, 1 - ε, 1 + ε_high)), ρ = exp(logprobs - old_logprobs).

    All tensors [B, T]. `clip_range_high`: ε_high (Yu et al. 2025, DAPO); None = ε. `dual_clip` c (Ye et al. 2020):
    where A < 0, the surrogate is at least c·A.
    """
    low, high = 1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(advantages * ratio, advantages * ratio.clamp(low, high))
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    loss = -masked_sum(surrogate, response_mask)
    with torch.no_grad():
        count = response_mask.sum()
        stats = {
            "loss/policy": (loss.detach(), count),
            "policy/approx_kl": (masked_sum(ratio - 1 - log_ratio, response_mask), count),
            "policy/clip_fraction": (masked_sum(((ratio < low) | (ratio > high)).float(), response_mask), count),
            "policy/ratio": (masked_sum(ratio, response_mask), count),
        }
    return loss, stats


def regularised(
    pg_loss: Tensor,
    *,
    entropy: Tensor,
    kl: Tensor | None,
    response_mask: Tensor,
    ent_coef: float,
    kl_coef: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """pg_loss - ent_coef·Σ w·H + kl_coef·Σ w·KL. entropy, kl (an estimate with a gradient, or None): [B, T]; weights of
    tokens w: [B, T], or None for 1."""
    count = response_mask.sum()
    stats = {"policy/entropy": (masked_sum(entropy.detach(), response_mask), count)}
    loss = pg_loss
    if ent_coef:
        loss = loss - ent_coef * masked_sum(entropy if weights is None else weights * entropy, response_mask)
    if kl is not None:
        loss = loss + kl_coef * masked_sum(kl if weights is None else weights * kl, response_mask)
        stats["loss/kl"] = (masked_sum(kl.detach(), response_mask), count)
    return loss, stats


def max_ratio(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Largest ρ over the counted tokens, 0 for an empty mask (a maximum over ranks is then still right). Scalar."""
    with torch.no_grad():
        return torch.where(response_mask, (logprobs - old_logprobs).exp(), 0).max()


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    clip_range_vf: float | None = None,
    clip_max: bool = False,
) -> tuple[Tensor, Stats]:
    """Squared error Σ (V_pred - R)², [B, T]; with `clip_range_vf` V_pred moves at most that far from `old_values`.

    As in Stable-Baselines3 there is no factor 1/2, and no maximum with the unclipped error unless `clip_max`.
    """
    error = torch.where(response_mask, values - returns, 0)  # before the square: its gradient at NaN is NaN · 0
    squared = error**2
    if clip_range_vf is not None:
        near = old_values + (values - old_values).clamp(-clip_range_vf, clip_range_vf)
        clipped = torch.where(response_mask, near - returns, 0) ** 2
        squared = torch.maximum(squared, clipped) if clip_max else clipped
    loss = squared.sum()
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
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    clip_vf_max: bool = False,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    policy_coef: float = 1.0,
) -> tuple[Tensor, Stats]:
    """L = policy_coef·(L_policy - ent_coef·ΣH + kl_coef·ΣKL) + vf_coef·L_value (eq. 9, signs for descent).

    Tensors [B, T]; kl: an estimate with a gradient, or None; policy_coef is 0 while the critic warms up. Returns
    (sum, stats).
    """
    pg_loss, pg_stats = policy_loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        response_mask=response_mask,
        clip_range=clip_range,
        clip_range_high=clip_range_high,
        dual_clip=dual_clip,
    )
    objective, own = regularised(
        pg_loss, entropy=entropy, kl=kl, response_mask=response_mask, ent_coef=ent_coef, kl_coef=kl_coef
    )
    vf_loss, vf_stats = value_loss(
        values=values,
        old_values=old_values,
        returns=returns,
        response_mask=response_mask,
        clip_range_vf=clip_range_vf,
        clip_max=clip_vf_max,
    )
    loss = policy_coef * objective + vf_coef * vf_loss
    return loss, {**pg_stats, **vf_stats, **own, "loss/total": (loss.detach(), response_mask.sum())}
