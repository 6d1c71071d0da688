"""Advantage actor-critic (Mnih et al. 2016, algorithm S3, synchronous) as functions over tensors.

Losses are SUMS over response tokens with {name: (sum, count)} beside them, as in `algorithms.ppo`: the caller divides
by the global number of tokens of the optimizer step.
"""

import torch
from torch import Tensor

from algorithms.masked import masked_sum
from algorithms.ppo import Stats, value_loss


def policy_loss(*, logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Stats]:
    """Policy gradient -Σ A·log π(a), all [B, T]. Right only for tokens that the current policy sampled."""
    kept = torch.where(response_mask, advantages, 0)  # before the product: NaN here would be the gradient's NaN · 0
    loss = -masked_sum(kept * logprobs, response_mask)
    return loss, {"loss/policy": (loss.detach(), response_mask.sum())}


def a2c_loss(
    *,
    logprobs: Tensor,
    entropy: Tensor,
    values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    vf_coef: float,
    ent_coef: float,
) -> tuple[Tensor, Stats]:
    """L = -Σ A·log π(a) + vf_coef·Σ (V - R)² - ent_coef·Σ H. Tensors [B, T]; returns (sum, stats)."""
    pg_loss, pg_stats = policy_loss(logprobs=logprobs, advantages=advantages, response_mask=response_mask)
    vf_loss, vf_stats = value_loss(values=values, old_values=values, returns=returns, response_mask=response_mask)
    entropy_sum = masked_sum(entropy, response_mask)
    loss = pg_loss + vf_coef * vf_loss - ent_coef * entropy_sum
    own = {
        "policy/entropy": (entropy_sum.detach(), response_mask.sum()),
        "loss/total": (loss.detach(), response_mask.sum()),
    }
    return loss, {**pg_stats, **vf_stats, **own}
