"""A rollout in minibatches and micro-batches: every episode once, balanced, the same number on every rank."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lines, make_rollout, small_run

from train.batches import Rollout, balanced_parts, micro_batches, minibatches
from train.ppo import train


class OneRank:
    """Reductions of a world of one; `others`: what another rank has, in the order in which it is asked for."""

    def __init__(self, **others: torch.Tensor) -> None:
        self.others = others

    def min(self, x: torch.Tensor) -> torch.Tensor:
        return torch.minimum(x, self.others.get("min", x))

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, self.others.get("max", x))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.others.get("sum", torch.zeros_like(x))


def cut(rollout: Rollout, ranks: Any = None, **options: Any) -> list[list[Rollout]]:
    options = {"batch_size": 10, "micro_batch_size": 3, "whiten_each": False, **options}
    return list(minibatches(rollout, ranks or OneRank(), np.random.default_rng(1), **options))


def test_balanced_parts() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        n = int(rng.integers(1, 40))
        n_parts = int(rng.integers(1, n + 1))
        tokens = rng.integers(1, 50, n).tolist()
        seed = int(rng.integers(1000))
        parts = balanced_parts(tokens, n_parts, np.random.default_rng(seed))
        assert len(parts) == n_parts and all(parts)
        assert sorted(episode for part in parts for episode in part) == list(range(n))
        loads = [sum(tokens[episode] for episode in part) for part in parts]
        assert max(loads) - min(loads) <= max(tokens)
        assert parts == balanced_parts(tokens, n_parts, np.random.default_rng(seed))
    tokens = [7] * 12
    different = {str(balanced_parts(tokens, 3, np.random.default_rng(seed))) for seed in range(10)}
    assert len(different) == 10


def test_number_of_minibatches() -> None:
    counts = [9, 1, 4, 4, 2, 7, 3]  # 30 tokens
    for batch_size, expected in ((30, 1), (100, 1), (29, 2), (10, 3), (7, 5), (5, 6), (4, 7), (1, 7)):
        parts = cut(make_rollout(counts), batch_size=batch_size)
        assert len(parts) == expected == min(math.ceil(30 / batch_size), len(counts))
        used = [int(i) for part in parts for micro in part for i in micro.indices]
        assert sorted(used) == list(range(len(counts)))
        tokens = [sum(int(micro.response_mask.sum()) for micro in part) for part in parts]
        assert sum(tokens) == 30 and max(tokens) - min(tokens) <= 9
        assert all(len(micro) <= 3 for part in parts for micro in part)


def test_micro_batches_are_sorted_by_length() -> None:
    tokens = torch.tensor([3, 9, 1, 9, 4])
    assert [rows.tolist() for rows in micro_batches(tokens, 2)] == [[1, 3], [4, 0], [2]]


def test_a_rank_with_less_adds_micro_batches_in_which_nothing_counts() -> None:
    rollout = make_rollout([9, 1, 4, 4, 2, 7, 3])
    parts = cut(rollout, OneRank(min=torch.tensor(2), max=torch.tensor([4, 1])))
    assert len(parts) == 2  # the other rank cannot make three
    own = [math.ceil(sum(len(micro) for micro in part if micro.response_mask.any()) / 3) for part in parts]
    assert [len(part) for part in parts] == [4, own[1]] and own[0] < 4
    for micro in parts[0][own[0] :]:
        assert not micro.response_mask.any() and len(micro) > 0
    assert sum(int(micro.response_mask.sum()) for part in parts for micro in part) == 30


def test_rows_takes_padding_off_and_changes_nothing() -> None:
    rollout = make_rollout([9, 1, 4, 4, 2, 7, 3])
    index = torch.tensor([4, 2, 1])
    part = rollout.rows(index)
    width, length = int(rollout.prompt_mask[index].sum(1).max()), 4
    assert part.prompt_ids.shape == (3, width) and part.response_ids.shape == (3, length)
    for field in fields(Rollout):
        whole, own = getattr(rollout, field.name)[index], getattr(part, field.name)
        if field.name.startswith("prompt"):
            assert torch.equal(own, whole[:, whole.shape[1] - width :]), field.name
        else:
            assert torch.equal(own, whole[:, :length] if whole.ndim > 1 else whole), field.name
    assert int(part.prompt_mask.sum()) == int(rollout.prompt_mask[index].sum())
    assert int(part.response_mask.sum()) == 7


def test_advantages_are_normalised_over_the_minibatch_of_all_ranks() -> None:
    rollout = make_rollout([9, 1, 4, 4, 2, 7, 3])
    for part in cut(rollout, whiten_each=True):
        own = torch.cat([micro.advantages[micro.response_mask] for micro in part])
        assert float(own.mean()) == pytest.approx(0, abs=1e-6) and float(own.std()) == pytest.approx(1, abs=1e-6)
    # Another rank that holds the values 1, 2, 3, 4 in its only minibatch.
    other = torch.tensor([1.0, 2, 3, 4])
    moments = torch.tensor([[10.0, 30.0, 4.0]], dtype=torch.float64)
    (part,) = cut(rollout, OneRank(sum=moments), batch_size=100, whiten_each=True)
    values = torch.cat([rollout.advantages[rollout.response_mask], other])
    expected = (rollout.advantages - values.mean()) / values.std()
    for micro in part:
        rows, length = micro.indices, micro.response_mask.shape[1]
        assert torch.allclose(micro.advantages, expected[rows, :length] * micro.response_mask, atol=1e-6)


@pytest.mark.parametrize("batch_size", [9, 48])
def test_number_of_optimizer_steps_of_a_run(batch_size: int, models: Any, tmp_path: Path) -> None:
    options = {"alg__args__batch_size": batch_size, "train_evaluation__eval_every": 0}
    with small_run(tmp_path, models(), **options) as run:
        train(run)
        step = {float(state["step"]) for state in run.optimizer.state_dict()["state"].values()}
    rows = lines(run.folder / "metrics.jsonl")
    expected = [2 * min(math.ceil(48 / batch_size), int(row["rollout/episodes"])) for row in rows]
    assert [row["policy/optimizer_steps"] for row in rows] == expected
    assert step == {sum(expected)}
    assert all(row["rollout/tokens"] == 48 for row in rows)
