"""The numbers of an iteration: what the rollout was like, and what it cost."""

import math

import torch

from algorithms.advantages import kl_penalty
from algorithms.masked import mean_and_std, moments
from train.batches import Rollout
from train.setup import Run


def rollout_stats(run: Run, rollout: Rollout) -> dict[str, float]:
    """Means (and name_std) over the tokens or episodes of all ranks.

    Rewards and lengths are of complete episodes: one that the token budget cut has no terminal reward in the batch.
    With no complete episode they are NaN, null in the files.
    """
    tokens, complete, kl_div = rollout.response_mask, rollout.complete, run.config.alg.kl_div
    kl_reward = torch.zeros_like(rollout.kl)
    if not kl_div.in_loss:
        kl_reward = -run.state.kl_coef * kl_penalty(rollout.kl, kl_div.estimator)
    every = torch.ones_like(complete)
    measured = {
        "rollout/reward": (rollout.task_rewards.sum(1), complete),
        "rollout/length": (tokens.sum(1).float(), complete),
        "rollout/truncated": (rollout.truncated.float(), complete),
        "kl/ref": (rollout.kl, tokens),
        "kl/episode_reward": (kl_reward.sum(1), every),
        "policy/logprob": (rollout.old_logprobs, tokens),
        "policy/ref_logprob": (rollout.ref_logprobs, tokens),
    }
    if run.ranks.unwrap(run.model).value_head is not None:
        measured |= {"value/mean": (rollout.old_values, tokens), "value/return": (rollout.returns, tokens)}
    totals = run.ranks.sum(torch.stack([moments(x, mask) for x, mask in measured.values()]))
    stats = {"kl/coef": run.state.kl_coef}
    stats |= {"rollout/tokens": float(totals[3, 2]), "rollout/episodes": float(totals[4, 2])}
    for name, total in zip(measured, totals, strict=True):
        mean_std = mean_and_std(total, unbiased=False) if total[2] > 0 else (math.nan, math.nan)
        stats[name], stats[f"{name}_std"] = (float(x) for x in mean_std)
    return stats


def performance(run: Run) -> dict[str, float]:
    """perf/*: seconds and tokens/s per phase, memory and CPU use (means over ranks, peaks where the name says so)."""
    seconds = {"eval": 0.0, "checkpoint": 0.0, "reward": 0.0, **run.clock.take()}
    working = seconds["total"] - seconds["eval"] - seconds["checkpoint"]
    mine = {f"perf/seconds_{phase}": value for phase, value in seconds.items()}
    mine |= run.resources.take(run.sampler.envs.worker_pids, seconds["total"])
    mine |= {"perf/worker_restarts": run.sampler.envs.restarts, "perf/seconds_working": working}
    names = sorted(mine)
    values = torch.tensor([mine[name] for name in names], dtype=torch.float64)
    averages = run.ranks.sum(values) / run.ranks.world_size
    perf = dict(zip(names, averages.tolist(), strict=True))
    slowest = run.ranks.max(torch.tensor([seconds.get("wait", 0.0)], dtype=torch.float64))
    perf["perf/seconds_wait_max"] = float(slowest)
    tokens = run.config.alg.args.n_steps * run.config.env.n_envs * run.ranks.world_size
    for phase in ("generate", "env", "score", "update"):
        perf[f"perf/tokens_per_s_{phase}"] = tokens / max(perf[f"perf/seconds_{phase}"], 1e-9)
    perf["perf/tokens_per_s"] = tokens / perf["perf/seconds_working"]
    return perf
