"""Checkpoints appear complete or not at all, and the right ones are kept."""

import errno
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import small_run

from envs.sampler import PrioritySampler
from train import checkpoint, setup
from train.checkpoint import State, find, folder_of, load, save, saved_iterations
from train.strategy import Replicated


class Parts:
    """A model, an optimizer that has made a step, priorities; as a run of one rank has them."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.folder, self.data = folder, "fingerprint"
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        self.model[1].weight = self.model[0].weight  # tied, as embeddings are
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.sampler = PrioritySampler(4, 0.5)
        self.config = SimpleNamespace(differences=lambda other: sorted(k for k in other if other[k] != "same"))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        self.sampler.update([1], [float(self.model[0].bias.detach().abs().sum())])

    def arguments(self) -> dict[str, Any]:
        alone = SimpleNamespace(process_index=0, num_processes=1, device="cpu", mixed_precision="no")
        calls = {"broadcast": lambda x: x, "barrier": lambda: None, "strategy": Replicated(alone)}
        ranks = SimpleNamespace(is_main=True, world_size=1, **calls)
        wrapped = (self.model, self.optimizer)
        parts = {"models": {"model": self.model}, "wrapped": wrapped, "sampler": self.sampler}
        return {**parts, "data": self.data, "start": "fingerprint", "ranks": ranks}

    def save(self, iteration: int, keep_last: int = 2, best: int | None = None) -> None:
        state = State(iteration=iteration, kl_coef=0.25 * iteration, best_iteration=best, best_value=best and 1.5)
        save(self.folder, state, config={"key": "same"}, keep_last=keep_last, **self.arguments())

    def load(self, iteration: int) -> State:
        return load(folder_of(self.folder, iteration), config=self.config, **self.arguments())

    def numbers(self) -> list[torch.Tensor]:
        moments = [x for state in self.optimizer.state_dict()["state"].values() for x in state.values()]
        return [*self.model.state_dict().values(), *moments, torch.from_numpy(self.sampler.priorities.copy())]


def assert_equal(one: Parts, two: Parts) -> None:
    assert len(one.numbers()) == len(two.numbers()) > 7
    assert all(torch.equal(a, b) for a, b in zip(one.numbers(), two.numbers(), strict=True))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    parts, other = Parts(tmp_path), Parts(tmp_path, seed=1)
    parts.step()
    parts.save(3, best=3)
    assert other.load(3) == State(iteration=3, kl_coef=0.75, best_iteration=3, best_value=1.5)
    assert_equal(other, parts)
    parts.step(), other.step()
    assert_equal(other, parts)


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    kept = []
    for iteration, best in ((2, None), (4, 4), (6, 4), (8, 4), (9, 9), (12, 9), (15, 9)):
        parts.save(iteration, best=best)
        kept.append(saved_iterations(tmp_path))
    assert kept == [[2], [2, 4], [4, 6], [4, 6, 8], [8, 9], [9, 12], [9, 12, 15]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_12", "checkpoint_15", "checkpoint_9"]
    assert find(tmp_path, "auto") == tmp_path / "checkpoint_15"
    assert find(tmp_path, str(tmp_path / "checkpoint_9")) == tmp_path / "checkpoint_9"


@pytest.mark.parametrize("place", ["torch.save", "torch.save 2", "save_file", "fsync", "rename", "state.json"])
def test_a_save_that_fails_leaves_the_earlier_checkpoints(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path)
    parts.step()
    parts.save(1), parts.save(2)
    saved = Parts(tmp_path, seed=1)
    saved.load(2)
    parts.step()
    with monkeypatch.context() as patch:
        fail_at(patch, place)
        with pytest.raises(OSError, match="No space left"):
            parts.save(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    again = Parts(tmp_path, seed=2)
    again.load(2)
    assert_equal(again, saved)
    parts.save(3)  # there is room again
    assert saved_iterations(tmp_path) == [2, 3]


def fail_at(patch: pytest.MonkeyPatch, place: str) -> None:
    """The disk is full when a save gets to `place`."""
    name, _, call = place.partition(" ")
    owner, attribute = {
        "torch.save": (checkpoint.torch, "save"),
        "save_file": (checkpoint, "save_file"),
        "fsync": (checkpoint, "fsync"),
        "rename": (checkpoint.os, "rename"),
        "state.json": (Path, "write_text"),
    }[name]
    original, calls = getattr(owner, attribute), [0]

    def full(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == int(call or 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **kwargs)

    patch.setattr(owner, attribute, full)


def test_a_checkpoint_gets_its_name_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(tmp_path)
    parts.save(1)
    rename, complete = checkpoint.os.rename, sorted(path.name for path in (tmp_path / "checkpoint_1").iterdir())
    seen = []

    def watched(source: Path, target: Path) -> None:
        seen.append((saved_iterations(tmp_path), source.name, sorted(path.name for path in source.iterdir())))
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", watched)
    parts.save(2, keep_last=1)
    assert seen == [([1], ".writing_2", complete), ([1, 2], "checkpoint_1", complete)]
    assert complete == ["model.safetensors", "optimizer.pt", "sampler.pt", "state.json"]


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.save(1)
    for name in (".writing_2", ".removing_1", ".removing_7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    assert find(tmp_path, "auto").name == "checkpoint_1"
    parts.save(3, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_3"]


def test_refused_checkpoints(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        find(tmp_path, "auto")
    with pytest.raises(FileNotFoundError, match="--resume elsewhere: there is no checkpoint"):
        find(tmp_path, "elsewhere")
    parts.save(1)
    parts.config = SimpleNamespace(differences=lambda other: ["alg.args.gamma"])
    with pytest.raises(ValueError, match=r"another configuration; these keys differ: alg\.args\.gamma"):
        parts.load(1)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "sampler.pt", "state.json"])
@pytest.mark.parametrize("content", [b"", b"junk", None])
def test_a_damaged_checkpoint_is_named_with_those_that_are_left(
    file: str, content: bytes | None, tmp_path: Path
) -> None:
    parts = Parts(tmp_path)
    parts.step(), parts.save(1), parts.save(2)
    path = folder_of(tmp_path, 2) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    with pytest.raises(ValueError, match="checkpoint_2 is damaged .* give --resume another one of: .*checkpoint_1"):
        parts.load(2)
    assert parts.load(1).iteration == 1


def test_other_samples_are_not_gone_on_with(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.save(1)
    parts.data = "other"
    parts.config.datapool = SimpleNamespace(id="jsonl")
    with pytest.raises(ValueError, match="was written with other samples: what datapool jsonl gives has changed"):
        parts.load(1)


@pytest.mark.parametrize(
    ("higher_is_better", "values", "best"),
    [(True, [2.0, 1.0, 3.0, 3.0], 3), (False, [2.0, 1.0, 3.0, 1.0], 2), (True, [math.nan, 1.0, math.nan, 0.5], 2)],
)
def test_the_best_iteration(higher_is_better: bool, values: list[float], best: int) -> None:
    run = object.__new__(setup.Run)
    spec = SimpleNamespace(best_metric="score", higher_is_better=higher_is_better)
    run.config, run.state = SimpleNamespace(train_evaluation=spec), State()
    for iteration, value in enumerate(values, 1):
        run.state = replace(run.state, iteration=iteration)
        run.note_best({"score": value, "reward": -value})
        assert run.is_best() == (run.state.best_iteration == iteration)
    assert run.state.best_iteration == best and run.state.best_value == values[best - 1]


def test_a_full_disk_stops_a_run_and_leaves_its_checkpoints(
    models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_run(tmp_path, models()) as run:
        for iteration in (1, 2):
            run.state = replace(run.state, iteration=iteration)
            if iteration == 2:
                fail_at(monkeypatch, "torch.save")
                with pytest.raises(OSError, match="No space left"):
                    run.save()
            else:
                run.save()
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["checkpoint_1"]
