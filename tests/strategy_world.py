"""What the launches of test_strategies.py have left, and what it has to be."""

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT, lines
from safetensors.torch import load_file
from strategy_runs import (
    ENDED_BY,
    alone_of,
    differing,
    family_of,
    make_models,
    n_shares,
    relative,
    run_script,
)
from torch import Tensor

SCRIPT = ROOT / "tests" / "distributed" / "strategies_jobs.py"
ALONE = ("whole", "adapters", "gathered", "stopping", "algorithms")
FIRST = ("whole", "accumulated", "gathered", "stopping", "poisoned", "adapters", "algorithms", "killed_in_update")
SECOND = ("resumed", "refused", "killed_in_save")


class World:
    """Models, and a folder for each strategy."""

    def __init__(self, root: Path) -> None:
        self.root, self.models = root, make_models(root / "models")
        self.launch = functools.cache(self._launch)

    def _launch(self, strategy: str, jobs: tuple[str, ...], processes: int = 2) -> tuple[str, float]:
        """(what it printed, seconds from the killing of a rank, if that is its last job, to the launcher's end)."""
        name = strategy if processes == 2 else f"{strategy}_on_{processes}"
        words = (self.models, str(8 // n_shares(strategy, processes)), *jobs)
        done = run_script(SCRIPT, self.root / name, strategy, *words, processes=processes)
        ended = time.time()
        if not jobs[-1].startswith("killed"):
            assert done.returncode == 0, done.stdout
            return done.stdout, 0.0
        mark = self.root / name / "killed_at"
        assert mark.exists(), done.stdout
        assert done.returncode != 0 and ENDED_BY in done.stdout, done.stdout
        seconds = ended - float(mark.read_text())
        mark.unlink()
        return done.stdout, seconds

    def run(self, strategy: str, name: str) -> Path:
        """The folder of a run of the first launch."""
        self.launch(strategy, ALONE if strategy.startswith("single") else FIRST)
        return self.root / strategy / "tests" / name

    def alone(self, strategy: str, name: str) -> Path:
        """The folder of the same run in one process."""
        return self.run(alone_of(family_of(strategy)), name)

    def outcome(self, strategy: str, algorithm: str, family: str) -> str:
        """ "agrees", if the algorithm's run does with that of one process, or the reason of its refusal."""
        name = f"{algorithm}_{family}"
        ours, theirs = self.run(strategy, name), self.run(alone_of(family), name)
        refusal = ours.parents[1] / f"{name}.refused"
        if refusal.exists():
            return refusal.read_text()
        assert not (theirs.parents[1] / refusal.name).exists()
        if algorithm == "supervised":
            assert_same_supervised(ours, theirs)
            return "agrees"
        start = torch.load(theirs.parents[1] / f"{name}.start")
        ours_then, theirs_then = weights(ours, 2), weights(theirs, 2)
        assert relative(start | theirs_then, start) > 1e-3, name
        assert (difference := relative(ours_then, theirs_then, start)) < 1e-4, (name, difference)
        for row, other in zip(lines(ours / "metrics.jsonl"), lines(theirs / "metrics.jsonl"), strict=True):
            for key in ("rollout/reward", "rollout/tokens", "kl/ref", "policy/entropy"):
                assert abs(row[key] - other[key]) < 1e-4, (name, key)
        return "agrees"


def weights(run: Path, iteration: int) -> dict[str, Tensor]:
    """Policy and critic of a checkpoint."""
    return load_file(run / f"checkpoints/checkpoint_{iteration}/model.safetensors")


def episodes(run: Path, iteration: int) -> list[list[list[list[int]]]]:
    """[prompt, response] of the episodes of each rank."""
    (found,) = [row["ranks"] for row in lines(run / "rollouts.jsonl") if row["iteration"] == iteration]
    return list(found)


def assert_same_training(ours: Path, theirs: Path, n_iters: int) -> None:
    """The same tokens, metrics and weights, within rounding, from the first iteration to the last."""
    rows, others = (lines(run / "metrics.jsonl") for run in (ours, theirs))
    assert len(rows) == n_iters and differing(rows, others, 1e-4) == []
    for iteration in range(1, n_iters + 1):
        one, two = (sorted(sum(episodes(run, iteration), [])) for run in (ours, theirs))
        assert one == two, f"iteration {iteration}"
        assert relative(weights(ours, iteration), weights(theirs, iteration)) < 1e-4, f"iteration {iteration}"
    start = weights(theirs, 1)
    assert relative(weights(ours, n_iters), weights(theirs, n_iters), start) < 1e-4
    assert relative(start, weights(theirs, n_iters)) > 1e-3


def assert_same_supervised(ours: Path, theirs: Path) -> None:
    one, two = (load_file(run / "model/model.safetensors") for run in (ours, theirs))
    assert relative(one, two) < 1e-5
    rows: list[list[dict[str, Any]]] = [lines(run / "val_split_metrics.jsonl") for run in (ours, theirs)]
    assert rows[0][0]["metrics"]["supervised/loss"] > rows[0][-1]["metrics"]["supervised/loss"]
    assert [row["metrics"] for row in rows[0]] == [pytest.approx(row["metrics"], rel=1e-4) for row in rows[1]]
