"""From prompts to a batch of scored, rewarded transitions."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algorithms.advantages import gae, kl_estimate, token_rewards
from algorithms.masked import moments, whiten
from algorithms.sampling import SamplingSpec, sample_responses
from envs.rewards.contract import call_batched
from envs.sampler import PrioritySampler
from envs.streams import uniforms
from envs.vector import TextVectorEnv
from train.batches import Rollout, micro_batches
from train.distributed import Ranks

Phase = Callable[[str], contextlib.AbstractContextManager[Any]]


@dataclass(kw_only=True)
class Wave:
    """What one round of n_envs episodes brought; CPU or device tensors as in `Rollout`, before scoring."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    lengths: Tensor
    action_mask: Tensor | None
    task_rewards: Tensor
    truncated: Tensor
    indices: Tensor


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """All that a rollout needs beside the models: where prompts come from, how tokens are sampled, who rewards."""

    envs: TextVectorEnv
    data: str  # fingerprint of the samples
    spec: SamplingSpec
    eos_token_ids: list[int]
    stop_on_eos: bool
    pad_token_id: int
    seed: int
    first_env: int
    device_reward: Any = None


def play_wave(lm: Any, sampler: Sampler, iteration: int, wave: int, ranks: Ranks, phase: Phase) -> Wave:
    """One episode in every environment: draw prompts, sample responses, let the environments reward them."""
    n_envs, spec, device = sampler.envs.num_envs, sampler.spec, ranks.device
    streams = range(sampler.first_env, sampler.first_env + n_envs)
    with phase("env"):
        draws = np.array([uniforms(sampler.seed, "prompt", iteration, wave, env, size=1)[0] for env in streams])
        indices = sampler.envs.sampler.draw(draws)
        observation, _ = sampler.envs.reset(options={"indices": indices})
        prompt_ids = torch.as_tensor(observation["prompt_ids"], dtype=torch.int64)
        prompt_mask = torch.as_tensor(observation["prompt_mask"], dtype=torch.int64)
        width = int(prompt_mask.sum(1).max())
        prompt_ids, prompt_mask = (x[:, x.shape[1] - width :].to(device) for x in (prompt_ids, prompt_mask))
    with phase("generate"), ranks.precision():
        drawn = [uniforms(sampler.seed, "token", iteration, wave, env, size=spec.max_new_tokens) for env in streams]
        responses = sample_responses(
            lm,
            prompt_ids,
            prompt_mask,
            torch.tensor(np.array(drawn), dtype=torch.float32, device=device),
            spec,
            eos_token_ids=sampler.eos_token_ids,
            stop_on_eos=sampler.stop_on_eos,
            pad_token_id=sampler.pad_token_id,
        )
    with phase("env"):
        lengths = responses.lengths.cpu()
        tokens = [row[:n].tolist() for row, n in zip(responses.ids.cpu(), lengths, strict=True)]
        played = sampler.envs.play(tokens)
        task_rewards = torch.zeros(n_envs, spec.max_new_tokens)
        task_rewards[:, : played.rewards.shape[1]] = torch.as_tensor(played.rewards, dtype=torch.float32)
    if sampler.device_reward is not None:
        with phase("reward"):
            scores = torch.tensor(call_batched(sampler.device_reward, played.episodes), dtype=torch.float32)
            task_rewards[torch.arange(n_envs), lengths - 1] += scores
    return Wave(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=responses.ids,
        lengths=lengths.to(device),
        action_mask=responses.action_mask,
        task_rewards=task_rewards.to(device),
        truncated=torch.as_tensor(played.truncated, device=device),
        indices=torch.as_tensor(indices, device=device),
    )


def cut_to_budget(lengths: Tensor, budget: int) -> Tensor:
    """How many tokens of each episode count: all of them, in order, until `budget` is spent. int64 [B] → int64 [B]."""
    spent_before = lengths.cumsum(0) - lengths
    return (budget - spent_before).clamp(min=0).minimum(lengths)


def collect_waves(lm: Any, sampler: Sampler, n_tokens: int, iteration: int, ranks: Ranks, phase: Phase) -> list[Wave]:
    """Waves of episodes until this rank has its tokens. No collectives: ranks may need different numbers of waves."""
    waves: list[Wave] = []
    missing = n_tokens
    while missing > 0:
        waves.append(play_wave(lm, sampler, iteration, len(waves), ranks, phase))
        missing -= int(waves[-1].lengths.sum())
    return waves


def merge(waves: Sequence[Wave], n_tokens: int, bootstrap_truncated: bool) -> Rollout:
    """One batch of exactly `n_tokens` transitions out of the waves; scores and advantages are still 0."""
    width = max(wave.prompt_ids.shape[1] for wave in waves)
    for wave in waves:
        missing = width - wave.prompt_ids.shape[1]
        wave.prompt_ids = torch.nn.functional.pad(wave.prompt_ids, (missing, 0))
        wave.prompt_mask = torch.nn.functional.pad(wave.prompt_mask, (missing, 0))
    joined = {
        f.name: None if getattr(waves[0], f.name) is None else torch.cat([getattr(wave, f.name) for wave in waves])
        for f in fields(Wave)
    }
    counts = cut_to_budget(joined["lengths"], n_tokens)
    kept = counts > 0
    joined = {name: None if x is None else x[kept] for name, x in joined.items()}
    counts, lengths = counts[kept], joined.pop("lengths")
    mask = torch.arange(joined["response_ids"].shape[1], device=counts.device) < counts[:, None]
    assert int(mask.sum()) == n_tokens, "a batch is exactly n_steps × n_envs transitions"
    zero = torch.zeros_like(joined["task_rewards"])
    names = ("old_logprobs", "ref_logprobs", "old_values", "kl", "rewards", "advantages", "returns")
    joined["task_rewards"] = torch.where(mask, joined["task_rewards"], 0)
    complete = counts == lengths
    goes_on = ~complete | (joined["truncated"] if bootstrap_truncated else torch.zeros_like(complete))
    return Rollout(
        **joined, response_mask=mask, complete=complete, bootstrap=goes_on.float(), **{name: zero for name in names}
    )


@torch.no_grad()
def score(
    rollout: Rollout, model: Any, reference: Any, ranks: Ranks, *, temperature: float, micro_batch_size: int
) -> None:
    """Fill in old_logprobs, old_values, kl and bootstrap: one teacher-forced forward of each model.

    Raises FloatingPointError naming the sample if a log-probability is not finite.
    """
    results: dict[str, list[Tensor]] = {name: [] for name in ("old_logprobs", "ref_logprobs", "old_values", "kl")}
    order = micro_batches(rollout.response_mask.sum(1), micro_batch_size)
    for rows in order:
        part = rollout.rows(rows)
        inputs = (part.prompt_ids, part.prompt_mask, part.response_ids, part.response_mask)
        own = model(*inputs, temperature=temperature, action_mask=part.action_mask, unrestricted=True)
        with ranks.precision():
            ref = reference(*inputs, temperature=temperature)
        kl = torch.where(part.response_mask, kl_estimate(own.raw_logprobs, ref.raw_logprobs), 0)
        counts = part.response_mask.sum(1)
        rollout.bootstrap[rows] *= own.values.gather(1, counts[:, None]).squeeze(1)
        new = (own.logprobs, ref.logprobs, own.values[:, :-1], kl)
        for parts, x in zip(results.values(), new, strict=True):
            parts.append(torch.nn.functional.pad(x, (0, rollout.response_ids.shape[1] - x.shape[1])))
    back = torch.cat(order).argsort()
    for name, parts in results.items():
        setattr(rollout, name, torch.where(rollout.response_mask, torch.cat(parts)[back], 0))
    finite = (
        torch.isfinite(rollout.old_logprobs) & torch.isfinite(rollout.kl) & torch.isfinite(rollout.old_values)
    ).all(1)
    if not finite.all():
        bad = rollout.indices[~finite].tolist()
        raise FloatingPointError(f"a log-probability or value is not finite in the episodes of training samples {bad}")


def assign_credit(
    rollout: Rollout, ranks: Ranks, *, kl_coef: float, norm_reward: bool, gamma: float, gae_lambda: float
) -> None:
    """Fill in rewards, advantages and returns."""
    rollout.rewards = token_rewards(rollout.task_rewards, rollout.kl, rollout.response_mask, kl_coef=kl_coef)
    if norm_reward:
        total = ranks.sum(moments(rollout.rewards, rollout.response_mask))
        rollout.rewards = whiten(rollout.rewards, rollout.response_mask, total, unbiased=False)
    rollout.advantages, rollout.returns = gae(
        rollout.rewards,
        rollout.old_values,
        rollout.response_mask,
        rollout.bootstrap,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )


def update_priorities(rollout: Rollout, sampler: PrioritySampler, ranks: Ranks) -> None:
    """Prioritised level replay: a sample's priority becomes its mean |advantage|, the same on every rank.

    At least a hundredth of the batch's average, so that a sample that taught nothing once is still drawn some day.
    """
    if sampler.priority_scale == 0:
        return
    mean = rollout.advantages.abs().sum(1) / rollout.response_mask.sum(1)
    pairs = ranks.gather(list(zip(rollout.indices.tolist(), mean.tolist(), strict=True)))
    floor = 0.01 * sum(priority for _, priority in pairs) / len(pairs)
    sampler.update([index for index, _ in pairs], [max(priority, floor) for _, priority in pairs])
