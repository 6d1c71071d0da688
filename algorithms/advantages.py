"""From task rewards to advantages: the KL penalty, its controller, and generalised advantage estimation."""

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate k1 = log π(a) - log π_ref(a) of KL(π ‖ π_ref), unbiased for a ~ π. Any equal shapes, nats.

    Both log-probabilities are of the unrestricted distributions at the sampling temperature.
    """
    return logprobs - ref_logprobs


def token_rewards(task_rewards: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """r_t = task_t - kl_coef · kl_t at every response token, the last included; 0 elsewhere. All tensors [B, T]."""
    return torch.where(response_mask, task_rewards - kl_coef * kl, 0)


def update_kl_coef(kl_coef: float, kl: float, target_kl: float | None) -> float:
    """One step of the adaptive KL controller (Ziegler et al. 2019, section 2.2, with RL4LMs' constants).

    e = clip((kl - target)/target, ±0.2); coef ← coef·(1 + 0.1·e): at most 2 % per iteration.
    `kl` is the mean per-token KL to the reference over all response tokens of all ranks. No target: unchanged.
    """
    if target_kl is None:
        return kl_coef
    error = min(max((kl - target_kl) / target_kl, -0.2), 0.2)
    return kl_coef * (1.0 + 0.1 * error)


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, bootstrap: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (advantages, returns), both [B, T].

    δ_t = r_t + γ·V_{t+1} - V_t,  A_t = δ_t + γλ·A_{t+1},  returns = A + V.
    rewards, values, response_mask: [B, T]. `bootstrap` [B]: V after the last counted token, 0 where the episode
    ended for good. The recursion steps from counted token to counted token, so gaps in the mask (tokens that an
    environment wrote) are no transitions. Outside the mask both results are 0.
    """
    advantages = torch.zeros_like(values)
    next_value, next_advantage = bootstrap.to(values.dtype), torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        counted = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(counted, advantage, 0)
        next_value = torch.where(counted, values[:, t], next_value)
        next_advantage = torch.where(counted, advantage, next_advantage)
    return advantages, torch.where(response_mask, advantages + values, 0)
