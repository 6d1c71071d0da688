"""Two ranks with half of the environments each are one process with all of them, whatever the algorithm and model."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from algorithm_runs import ALGORITHMS, KINDS
from helpers import DDP_CPU, ROOT, distance, launch, lines

SCRIPT = Path(__file__).with_name("every_algorithm.py")


def test_two_ranks_train_what_one_process_trains(models: Callable[..., Path], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    folders = [models(family) for family in KINDS]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    subprocess.run([sys.executable, SCRIPT, one, "4", *folders], check=True, env=env, cwd=ROOT)
    done = launch("--config_file", DDP_CPU, SCRIPT, two, "2", *folders, timeout=240)
    assert done.returncode == 0, done.stdout
    for name in [f"{algorithm}_{family}" for algorithm in ALGORITHMS for family in KINDS]:
        (before, ours), (same, theirs) = (torch.load(folder / f"{name}.pt") for folder in (two, one))
        assert torch.equal(before, same), name
        assert distance(theirs, before) > 1e-3, name
        # The conjugate gradient makes more of rounding than a gradient does.
        assert distance(ours - before, theirs - before) < (5e-3 if name.startswith("trpo") else 1e-4), name
        ours_rows, their_rows = (lines(folder / f"tests/{name}/metrics.jsonl") for folder in (two, one))
        assert [row["rollout/tokens"] for row in ours_rows] == [64, 64]
        for a, b in zip(ours_rows, their_rows, strict=True):
            for key in ("rollout/reward", "kl/ref", "policy/entropy"):
                assert abs(a[key] - b[key]) < 1e-4, (name, key)
