"""From task rewards to advantages: the KL penalty, its controller, and generalised advantage estimation."""

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate k1 = log π(a) - log π_ref(a) of KL(π ‖ π_ref), unbiased for a ~ π. Any equal shapes, nats.

    Both log-probabilities are of the unrestricted distributions at the sampling temperature.
    """
    return logprobs - ref_logprobs


def kl_penalty(kl: Tensor, estimator: str) -> Tensor:
    """The estimate "k1", "k2" or "k3" of the KL from `kl`, which is k1 (Schulman 2020, "Approximating KL divergence").

    k2 = k1²/2 and k3 = exp(-k1) - 1 + k1 are never negative. As a loss, k1 has the gradient 0 on average, k2 that of
    KL(π ‖ π_ref), k3 that of KL(π_ref ‖ π).
    """
    if estimator == "k1":
        return kl
    if estimator == "k2":
        return kl.square() / 2
    assert estimator == "k3", estimator
    return torch.expm1(-kl) + kl


def shape_rewards(
    task_rewards: Tensor,
    response_mask: Tensor,
    truncated: Tensor,
    *,
    scale: float,
    clip: float | None,
    missing_eos_penalty: float,
) -> Tensor:
    """The rewards that training sees, [B, T]: scaled, then limited to ±clip, then less `missing_eos_penalty` at the
    last token of a response that ended without EOS. task_rewards, response_mask (of whole responses): [B, T];
    truncated: bool [B]."""
    shaped = task_rewards * scale
    if clip is not None:
        shaped = shaped.clamp(-clip, clip)
    if missing_eos_penalty:
        last = response_mask.sum(1, keepdim=True) - 1
        shaped = shaped.scatter_add(1, last, -missing_eos_penalty * truncated[:, None].to(shaped.dtype))
    return shaped


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


def group_advantages(rewards: Tensor, *, estimator: str, scale: bool = True) -> Tensor:
    """Advantages of whole responses among those to the same prompt. rewards: [G, N], a group a row; returns [G, N].

    "grpo" (Shao et al. 2024, eq. 3): r - mean, over the standard deviation + 1e-4 if `scale` (without it: Liu et al.
    2025, Dr. GRPO). "rloo" (Ahmadian et al. 2024, eq. 9): r less the mean of the other N - 1.

    In float64, and with that much added, equal rewards and those that differ by rounding alone teach nothing.
    """
    exact = rewards.double()
    centred = exact - exact.mean(1, keepdim=True)
    assert estimator in ("grpo", "rloo"), estimator
    if estimator == "rloo":
        centred = centred * (rewards.shape[1] / (rewards.shape[1] - 1))
    elif scale:
        centred = centred / (exact.std(1, keepdim=True) + 1e-4)
    return centred.to(rewards.dtype)


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
