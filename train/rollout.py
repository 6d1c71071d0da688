"""From prompts to a batch of transitions: waves of episodes, cut to the token budget."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algorithms.policy import LanguageModel
from algorithms.sampling import SamplingSpec, sample_responses
from envs.rewards.contract import call_batched
from envs.streams import uniforms
from envs.vector import TextVectorEnv
from train.batches import Rollout
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
    mask_statistics: Tensor | None
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
    group_size: int = 1  # so many environments side by side answer the same prompt
    device_reward: Any = None


def play_wave(
    models: Sequence[LanguageModel],
    sampler: Sampler,
    iteration: int,
    wave: int,
    ranks: Ranks,
    phase: Phase,
    going_on: Callable[[bool], bool] = bool,
) -> Wave:
    """One episode in every environment: draw prompts, sample responses, let the environments reward them.

    models: the policy and, for NLPO's learned masks, the mask policy. going_on: see `train.gathering`.
    """
    n_envs, spec, device = sampler.envs.num_envs, sampler.spec, ranks.device
    streams = range(sampler.first_env, sampler.first_env + n_envs)
    with phase("env"):
        groups = [env // sampler.group_size for env in streams]
        draws = np.array([uniforms(sampler.seed, "prompt", iteration, wave, group, size=1)[0] for group in groups])
        indices = sampler.envs.sampler.draw(draws)
        observation, _ = sampler.envs.reset(options={"indices": indices})
        prompt_ids = torch.as_tensor(observation["prompt_ids"], dtype=torch.int64)
        prompt_mask = torch.as_tensor(observation["prompt_mask"], dtype=torch.int64)
        width = int(prompt_mask.sum(1).max())
        prompt_ids, prompt_mask = (x[:, x.shape[1] - width :].to(device) for x in (prompt_ids, prompt_mask))
    with phase("generate"), ranks.precision():
        drawn = [uniforms(sampler.seed, "token", iteration, wave, env, size=spec.max_new_tokens) for env in streams]
        responses = sample_responses(
            models[0],
            prompt_ids,
            prompt_mask,
            torch.tensor(np.array(drawn), dtype=torch.float32, device=device),
            spec,
            eos_token_ids=sampler.eos_token_ids,
            stop_on_eos=sampler.stop_on_eos,
            pad_token_id=sampler.pad_token_id,
            mask_model=models[1] if len(models) > 1 else None,
            going_on=going_on,
        )
    with phase("env"):
        lengths = responses.lengths.cpu()
        tokens = [row[:n].tolist() for row, n in zip(responses.ids.cpu(), lengths, strict=True)]
        played = ranks.same(sampler.envs.play(tokens))
        task_rewards = torch.zeros(n_envs, spec.max_new_tokens)
        task_rewards[:, : played.rewards.shape[1]] = torch.as_tensor(played.rewards, dtype=torch.float32)
    if sampler.device_reward is not None:
        with phase("reward"):
            scores = ranks.same(torch.tensor(call_batched(sampler.device_reward, played.episodes), dtype=torch.float32))
            task_rewards[torch.arange(n_envs), lengths - 1] += scores
    return Wave(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=responses.ids,
        lengths=lengths.to(device),
        action_mask=responses.action_mask,
        mask_statistics=responses.mask_statistics,
        task_rewards=task_rewards.to(device),
        truncated=torch.as_tensor(played.truncated, device=device),
        indices=torch.as_tensor(indices, device=device),
    )


def cut_to_budget(lengths: Tensor, budget: int) -> Tensor:
    """How many tokens of each episode count: all of them, in order, until `budget` is spent. int64 [B] → int64 [B]."""
    spent_before = lengths.cumsum(0) - lengths
    return (budget - spent_before).clamp(min=0).minimum(lengths)


def collect_waves(
    models: Sequence[LanguageModel],
    sampler: Sampler,
    n_tokens: int,
    iteration: int,
    ranks: Ranks,
    phase: Phase,
    going_on: Callable[[bool], bool] = bool,
) -> list[Wave]:
    """Waves of episodes until this rank has its tokens, and while another has not, where `going_on` says so: ranks that
    generate on their own may need different numbers of waves."""
    waves: list[Wave] = []
    missing = n_tokens
    while going_on(missing > 0):
        wave = play_wave(models, sampler, iteration, len(waves), ranks, phase, going_on)
        if missing > 0:  # else it was for another rank's sake
            waves.append(wave)
        missing -= int(wave.lengths.sum())
    return waves


def merge(
    waves: Sequence[Wave], n_tokens: int, *, bootstrap_truncated: bool = False, group_size: int = 1
) -> tuple[Rollout, Tensor]:
    """One batch out of the waves, and how many tokens of each episode are in the budget, int64 [B]: `n_tokens` in all.

    response_mask still covers whole responses (`train.collect.cut` ends that), scores and advantages are 0. Groups of
    which any episode is in the budget are kept whole.
    """
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
    assert int(counts.sum()) == n_tokens, "a batch is exactly n_steps × n_envs transitions"
    kept = (counts.view(-1, group_size) > 0).any(1).repeat_interleave(group_size)
    joined = {name: None if x is None else x[kept] for name, x in joined.items()}
    counts, lengths = counts[kept], joined["lengths"]
    mask = torch.arange(joined["response_ids"].shape[1], device=counts.device) < lengths[:, None]
    zero = torch.zeros_like(joined["task_rewards"])
    names = ("old_logprobs", "ref_logprobs", "old_values", "kl", "rewards", "advantages", "returns")
    complete = counts == lengths
    goes_on = ~complete | (joined["truncated"] if bootstrap_truncated else torch.zeros_like(complete))
    rollout = Rollout(
        **joined,
        response_mask=mask,
        loss_mask=mask,
        complete=complete,
        bootstrap=goes_on.float(),
        **{name: zero for name in names},
    )
    return rollout, counts
