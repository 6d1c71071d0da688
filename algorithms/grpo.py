"""Group relative policy optimisation (Shao et al. 2024) and its critic-free relatives, as functions over tensors.

They differ from PPO in the advantages (`algorithms.advantages.group_advantages`) and in what a token weighs.
"""

import torch
from torch import Tensor

from algorithms.ppo import Stats, policy_loss, regularised


def token_weights(response_mask: Tensor, normalization: str) -> Tensor:
    """Weights [B, T] of the tokens in the loss: 1, or with "sequence" 1 / length. response_mask: bool [B, T]."""
    weights = response_mask.float()
    return weights / weights.sum(1, keepdim=True).clamp(min=1) if normalization == "sequence" else weights


def loss_count(response_mask: Tensor, normalization: str, max_length: int) -> Tensor:
    """What the summed loss of these responses is to be divided by: their number of tokens ("token"), their number
    ("sequence"), or that times `max_length` ("constant": Liu et al. 2025, without a bias to any length). Scalar."""
    if normalization == "token":
        return response_mask.sum()
    episodes = response_mask.any(1).sum()
    return episodes if normalization == "sequence" else episodes * max_length


def grpo_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    weights: Tensor,
    response_mask: Tensor,
    clip_range: float,
    ent_coef: float,
    kl_coef: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    kl: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Σ w·(-min(A·ρ, A·clip(ρ)) - ent_coef·H + kl_coef·KL) (eq. 3 of Shao et al.). Tensors [B, T]; (sum, stats)."""
    pg_loss, pg_stats = policy_loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=weights * advantages,  # a positive factor: it leaves the minimum's choice as it is
        response_mask=response_mask,
        clip_range=clip_range,
        clip_range_high=clip_range_high,
        dual_clip=dual_clip,
    )
    loss, own = regularised(
        pg_loss,
        entropy=entropy,
        kl=kl,
        response_mask=response_mask,
        ent_coef=ent_coef,
        kl_coef=kl_coef,
        weights=weights,
    )
    with torch.no_grad():
        total = {"loss/total": (loss.detach(), response_mask.sum())}
    return loss, {**pg_stats, **own, **total}
