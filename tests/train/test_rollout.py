"""From prompts to a batch: how many tokens count, where rewards and bootstraps go, how often the models run."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_runs import options_of
from helpers import distance, flat, gradients, small_run

from train.batches import Rollout
from train.collect import collect, cut
from train.grpo import group_credit
from train.ppo import update
from train.rollout import Wave, collect_waves, cut_to_budget, merge, play_wave
from train.setup import Run

T = 8


def make_wave(rng: np.random.Generator, n_envs: int, action_mask: bool = False) -> Wave:
    """Episodes of random lengths, the longest truncated; each has reward 1 + its sample number on its last token."""
    lengths = torch.from_numpy(rng.integers(1, T + 1, n_envs))
    width = int(rng.integers(1, 6))
    prompt_mask = torch.arange(width) >= torch.from_numpy(rng.integers(0, width, n_envs))[:, None]
    indices = torch.from_numpy(rng.integers(0, 50, n_envs))
    last = torch.arange(T) == lengths[:, None] - 1
    return Wave(
        prompt_ids=torch.from_numpy(rng.integers(3, 30, (n_envs, width))) * prompt_mask,
        prompt_mask=prompt_mask.long(),
        response_ids=torch.from_numpy(rng.integers(3, 30, (n_envs, T))),
        lengths=lengths,
        mask_statistics=None,
        action_mask=torch.from_numpy(rng.integers(0, 256, (n_envs, T, 4), dtype=np.uint8)) if action_mask else None,
        task_rewards=last * (1.0 + indices[:, None]),
        truncated=lengths == T,
        indices=indices,
    )


def test_cut_to_budget() -> None:
    lengths = torch.tensor([3, 1, 4, 2])
    expected = {1: [1, 0, 0, 0], 3: [3, 0, 0, 0], 4: [3, 1, 0, 0], 6: [3, 1, 2, 0], 8: [3, 1, 4, 0], 10: [3, 1, 4, 2]}
    for budget, counts in expected.items():
        assert cut_to_budget(lengths, budget).tolist() == counts


@pytest.mark.parametrize("bootstrap_truncated", [False, True])
def test_a_batch_is_exactly_its_budget_for_any_lengths(bootstrap_truncated: bool) -> None:
    rng = np.random.default_rng(0)
    seen = Counter[str]()
    for trial in range(150):
        budget, n_envs = int(rng.integers(1, 90)), int(rng.integers(1, 7))
        waves = [make_wave(rng, n_envs, action_mask=trial % 2 == 0)]
        while sum(int(wave.lengths.sum()) for wave in waves) < budget:
            waves.append(make_wave(rng, n_envs, action_mask=trial % 2 == 0))
        lengths, truncated, indices = (
            torch.cat([getattr(wave, name) for wave in waves]) for name in ("lengths", "truncated", "indices")
        )
        tokens = torch.cat([wave.response_ids for wave in waves])
        prompts = [
            row[keep.bool()] for wave in waves for row, keep in zip(wave.prompt_ids, wave.prompt_mask, strict=True)
        ]

        rollout = cut(*merge(waves, budget, bootstrap_truncated=bootstrap_truncated))
        n, counts = len(rollout), rollout.response_mask.sum(1)
        assert int(counts.sum()) == budget
        assert torch.equal(rollout.response_mask, torch.arange(T) < counts[:, None])  # from the first token on, no gaps
        assert torch.equal(counts[:-1], lengths[: n - 1]) and 0 < counts[-1] <= lengths[n - 1]  # only the last is cut
        assert rollout.complete.tolist() == [True] * (n - 1) + [bool(counts[-1] == lengths[n - 1])]
        assert torch.equal(rollout.indices, indices[:n]) and torch.equal(rollout.response_ids, tokens[:n])
        for row, keep, prompt in zip(rollout.prompt_ids, rollout.prompt_mask, prompts[:n], strict=True):
            assert torch.equal(row[keep.bool()], prompt) and keep.tolist() == sorted(keep.tolist())
        # One terminal reward per complete episode, on its last token; none for the one that is cut.
        terminal = torch.arange(T) == counts[:, None] - 1
        expected = terminal * (1.0 + rollout.indices[:, None]) * rollout.complete[:, None]
        assert torch.equal(rollout.task_rewards, expected)
        goes_on = ~rollout.complete | (truncated[:n] & bootstrap_truncated)
        assert torch.equal(rollout.bootstrap, goes_on.float())
        assert (rollout.action_mask is None) == (trial % 2 == 1)
        seen["cut" if not rollout.complete[-1] else "whole"] += 1
        seen["truncated"] += int(truncated[:n].any())
    assert min(seen.values()) > 10, seen


@contextlib.contextmanager
def counted_forwards(run: Run) -> Iterator[dict[str, list[torch.Tensor]]]:
    """{trunk: the sequences that went through it teacher-forced}, while the context lasts."""
    model = run.ranks.unwrap(run.model)
    trunks = {"policy": model.policy.lm.base_model, "critic": model.critic, "reference": run.reference.lm.base_model}
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in trunks}

    def hook(name: str) -> Callable[..., None]:
        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not kwargs.get("use_cache"):  # sampling uses a cache
                seen[name].extend(kwargs["input_ids"])

        return note

    handles = [trunk.register_forward_pre_hook(hook(name), with_kwargs=True) for name, trunk in trunks.items()]
    yield seen
    for handle in handles:
        handle.remove()


def responses_of(sequences: list[torch.Tensor]) -> Counter[tuple[int, ...]]:
    """Sequences without padding (token 0), to compare as sets with multiplicities."""
    return Counter(tuple(token for token in row.tolist() if token) for row in sequences)


def test_each_sequence_passes_each_trunk_once_in_scoring_and_once_per_epoch(models: Any, tmp_path: Path) -> None:
    with small_run(tmp_path, models(), alg__args__n_epochs=3) as run:
        with counted_forwards(run) as scoring:
            rollout = collect(run, 1)
        with counted_forwards(run) as updating:
            update(run, rollout, 1)
    assert len(rollout) > 6
    whole = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)
    assert {name: len(rows) for name, rows in scoring.items()} == dict.fromkeys(scoring, len(rollout))
    assert responses_of(scoring["policy"]) == responses_of(scoring["reference"]) == responses_of(list(whole))
    assert {name: len(rows) for name, rows in updating.items()} == {
        "policy": 3 * len(rollout),
        "critic": 3 * len(rollout),
        "reference": 0,
    }


def value_after(run: Run, rollout: Rollout, row: int) -> float:
    """V of the state after the counted tokens of an episode, from the critic alone, without any padding."""
    model = run.ranks.unwrap(run.model)
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
    ids = torch.cat([prompt, rollout.response_ids[row][rollout.response_mask[row]]])
    with torch.no_grad():
        return float(model.value_head(model.critic(input_ids=ids[None]).last_hidden_state[0, -1]))


@pytest.mark.parametrize("bootstrap_truncated", [False, True])
def test_bootstraps_are_values_of_the_next_token(bootstrap_truncated: bool, models: Any, tmp_path: Path) -> None:
    options = {"env__args__bootstrap_truncated": bootstrap_truncated, "reward_fn": {"id": "user_code:one"}}
    with small_run(tmp_path, models(), value_head=1.0, **options) as run:
        rollout = collect(run, 2)
        assert not rollout.complete[-1] and rollout.truncated[:-1].any() and not rollout.truncated.all()
        for row in range(len(rollout)):
            goes_on = not rollout.complete[row] or (bootstrap_truncated and rollout.truncated[row])
            expected = value_after(run, rollout, row) if goes_on else 0.0
            assert float(rollout.bootstrap[row]) == pytest.approx(expected, abs=1e-5)
            assert not goes_on or abs(expected) > 1e-3
    # A reward of 1 for every episode is there once for each complete one.
    assert torch.equal(rollout.task_rewards.sum(1), rollout.complete.float())


def test_waves_go_on_until_the_tokens_are_there(models: Any, tmp_path: Path) -> None:
    with small_run(tmp_path, models()) as run:
        models_used = [run.ranks.unwrap(run.model).policy]
        for n_tokens in (1, 17, 48):
            waves = collect_waves(models_used, run.sampler, n_tokens, 1, run.ranks, run.clock)
            lengths = [int(wave.lengths.sum()) for wave in waves]
            assert all(len(wave.lengths) == 4 for wave in waves)
            assert sum(lengths) >= n_tokens > sum(lengths[:-1])
        assert len(waves) > 1 and not torch.equal(waves[0].response_ids, waves[1].response_ids)


def test_reward_on_the_device_by_dotted_path(models: Any, tmp_path: Path) -> None:
    reward = {"id": "user_code:OnDevice", "args": {"scale": 10.0}}
    with small_run(tmp_path, models(), reward_fn=reward) as run:
        wave = play_wave([run.ranks.unwrap(run.model).policy], run.sampler, 1, 0, run.ranks, run.clock)
        rollout = collect(run, 1)
    last = torch.arange(T) == wave.lengths[:, None] - 1
    numbers = torch.tensor([run.sampler.envs.sample("train", int(i)).meta["number"] for i in wave.indices])
    assert torch.equal(wave.task_rewards, last * (10.0 * wave.lengths + numbers)[:, None])
    assert torch.equal(rollout.task_rewards.sum(1) > 0, rollout.complete)


def test_stepwise_rewards_of_a_cut_episode_stop_at_the_budget(models: Any, tmp_path: Path) -> None:
    with small_run(tmp_path, models(), reward_fn={"id": "user_code:each_token"}) as run:
        rollout = collect(run, 2)
    assert not rollout.complete[-1]
    expected = (rollout.response_ids / 10 + torch.arange(T)) * rollout.response_mask
    assert torch.allclose(rollout.task_rewards, expected)


def test_a_sample_s_priority_is_its_mean_absolute_advantage(models: Any, tmp_path: Path) -> None:
    options = {"env__args__priority_scale": 2.0, "reward_fn": {"id": "user_code:each_token"}}
    with small_run(tmp_path, models(), **options) as run:
        rollout = collect(run, 1)
        sampler = run.sampler.envs.sampler
        expected = [1.0] * 12
        found: dict[int, list[float]] = {}
        for row, index in enumerate(rollout.indices.tolist()):
            found.setdefault(index, []).append(float(rollout.advantages[row][rollout.response_mask[row]].abs().mean()))
        assert max(map(len, found.values())) > 1
        for index, values in found.items():
            expected[index] = sum(values) / len(values)
        assert sampler.priorities.tolist() == pytest.approx(expected, rel=1e-5)
        largest = int(sampler.priorities.argmax())
        drawn = collect(run, 2).indices.tolist()
    assert drawn.count(largest) > 1 / 12 * len(drawn)


@pytest.mark.parametrize("generation", [{}, {"top_k": 5, "min_new_tokens": 2, "temperature": 0.7}])
def test_two_ranks_sample_what_one_process_with_all_environments_samples(
    generation: dict[str, Any], models: Any, tmp_path: Path
) -> None:
    options = {"alg__policy__args__generation_kwargs": generation}
    with small_run(tmp_path, models(), env__n_envs=6, **options) as run:
        policy = [run.ranks.unwrap(run.model).policy]
        together = play_wave(policy, run.sampler, 1, 0, run.ranks, run.clock)
    with small_run(tmp_path, models(), env__n_envs=3, **options) as run:
        halves = [replace(run.sampler, first_env=first) for first in (0, 3)]
        parts = [play_wave(policy, half, 1, 0, run.ranks, run.clock) for half in halves]
    for name in ("response_ids", "lengths", "task_rewards", "truncated", "indices"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(together, name)), name
    assert len(set(map(tuple, together.response_ids.tolist()))) == 6  # no two environments share a stream


def test_rewards_of_training_are_shaped_those_of_the_statistics_are_not(models: Any, tmp_path: Path) -> None:
    reward = {"id": "user_code:one", "scale": 3.0, "clip": 2.0, "missing_eos_penalty": 5.0}
    with small_run(tmp_path, models(), reward_fn=reward, alg__args__n_steps=24) as run:
        rollout = collect(run, 1)
    complete, last = rollout.complete, rollout.response_mask.sum(1) - 1
    assert (rollout.truncated & complete).any() and (~rollout.truncated).any()
    at_the_end = rollout.rewards.gather(1, last[:, None]).squeeze(1)
    assert torch.equal(at_the_end[complete], torch.where(rollout.truncated, -3.0, 2.0)[complete])
    assert torch.equal(rollout.task_rewards.sum(1), complete.float())
    assert rollout.rewards.count_nonzero() == complete.sum()


@pytest.mark.parametrize("scope", ["minibatch", "batch"])
def test_truncated_responses_can_be_left_out_of_the_losses(scope: str, models: Any, tmp_path: Path) -> None:
    options = {"alg__args__n_steps": 24, "alg__args__n_epochs": 1, "alg__args__advantage_scope": scope}
    with small_run(tmp_path, models(), **options, env__args__mask_truncated=True) as run:
        rollout = collect(run, 1)
        assert int(rollout.response_mask.sum()) == 96
        kept = rollout.response_mask & ~rollout.truncated[:, None]
        assert torch.equal(rollout.loss_mask, kept) and 0 < int(kept.sum()) < 96
        whole = {"alg__args__micro_batch_size": 100, "alg__args__batch_size": 96}
        (expected,) = gradients(run, replace(rollout), **whole)
        # What is left out may be anything; and a batch without it has the same gradient.
        rollout.returns = torch.where(kept, rollout.returns, 1e6)
        rollout.advantages = torch.where(kept, rollout.advantages, 1e6)
        (found,) = gradients(run, replace(rollout), **whole)
        assert distance(found, expected) < 1e-6
        (without,) = gradients(run, rollout.rows((~rollout.truncated).nonzero().squeeze(1)), **whole)
        assert distance(without, expected) < 1e-5
        rollout.loss_mask = torch.zeros_like(kept)
        before = flat(run.model)
        stats = update(run, rollout, 1)
        # Nothing counts, nothing moves.
        assert torch.equal(flat(run.model), before) and stats["loss/policy"] == stats["policy/optimizer_steps"] == 0


def test_the_budget_cuts_groups_after_their_advantages_are_known(models: Any, tmp_path: Path) -> None:
    """Each group answers one prompt; its advantages are of whole responses, also where the budget cuts them off."""
    options = options_of("grpo", "gpt2", num_generations=4, n_steps=9, seed=3)
    with small_run(tmp_path, models(), **options, env__n_envs=8, reward_fn={"id": "user_code:each_token"}) as run:
        waves = collect_waves([run.ranks.unwrap(run.model).policy], run.sampler, 72, 2, run.ranks, run.clock)
        rollout = collect(run, 2, group_credit)
    scores = torch.cat([wave.task_rewards.sum(1) for wave in waves]).view(-1, 4)
    indices = torch.cat([wave.indices for wave in waves]).view(-1, 4)
    assert (indices == indices[:, :1]).all() and len(indices[:, 0].unique()) > 1
    expected = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).flatten()
    n = len(rollout)
    assert n < scores.numel() and n % 4 != 0 and not rollout.complete[-1]
    assert int(rollout.response_mask.sum()) == 72
    for row in range(n):
        found = rollout.advantages[row][rollout.response_mask[row]]
        assert torch.allclose(found, expected[row].expand_as(found), atol=1e-5)
    assert not rollout.advantages[~rollout.response_mask].any()
