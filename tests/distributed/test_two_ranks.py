"""Two processes on the CPU: one training, not two; equal to one process; and over at once when a rank is lost."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers import DDP_CPU, ROOT, command, launch, lines

from train.ppo import main
from train.script import run_script

Models = Callable[..., Path]
HERE = Path(__file__).parent


def test_what_two_ranks_do_together_and_that_a_killed_rank_ends_the_run(models: Models, tmp_path: Path) -> None:
    options = {"env__args__priority_scale": 0.5, "reward_fn": {"id": "user_code:each_token"}}
    arguments = command(tmp_path, models(), **options)
    done = launch("--config_file", DDP_CPU, HERE / "two_ranks.py", *arguments)
    finished = time.time()
    found = re.search(r"processes (.*) checks passed", done.stdout)
    assert found, done.stdout
    # Rank 1 was killed then: the launcher says so, nothing hangs, no worker is left.
    assert done.returncode != 0 and "Signal 9" in done.stdout
    assert finished - (tmp_path / "tests/run/model/README.md").stat().st_mtime < 30
    pids = [int(pid) for pid in found[1].split()]
    assert len(set(pids)) == 4
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


def test_a_run_on_two_ranks(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digests, alone = tmp_path / "digests", tmp_path / "alone"
    digests.mkdir(), alone.mkdir()
    options = {"datapool__args": {"n": 5}, "train_evaluation__metrics": [{"id": "diversity"}]}
    recording = {
        "alg__policy__args__optimizer_class": "helpers:RecordingAdamW",
        "alg__policy__args__optimizer_kwargs": {"folder": str(digests)},
    }
    arguments = command(tmp_path, models(), **options, **recording)
    done = launch("--config_file", DDP_CPU, ROOT / "train" / "ppo.py", *arguments)
    assert done.returncode == 0, done.stdout
    folder = tmp_path / "tests/run"
    rows = lines(folder / "metrics.jsonl")
    assert [row["rollout/tokens"] for row in rows] == [2 * 12 * 4] * 2
    n_steps = sum(row["policy/optimizer_steps"] for row in rows)
    assert n_steps == 2 * 2 * 2  # iterations, epochs, minibatches
    left = {path.name: path.read_text() for path in digests.iterdir()}
    assert left.keys() == {"rank_0", "rank_1"} and left["rank_0"] == left["rank_1"]
    assert left["rank_0"].startswith(f"{n_steps:.0f} ")
    # The evaluation before training is that of one process.
    main(command(alone, models(), **options, train_evaluation__n_iters=0))
    for split in ("val", "test"):
        one, two = (lines(place / f"{split}_split_metrics.jsonl")[0] for place in (folder, alone / "tests/run"))
        assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-5)
    # A checkpoint of two ranks is no start for one.
    with pytest.raises(SystemExit):
        run_script(lambda: main([*arguments, "--resume"]))
    assert "was written by 2 ranks; this run has 1" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["--cpu", "MULTI_CPU", "no variable"])
def test_a_world_that_is_not_the_one_asked_for_is_refused(how: str, tmp_path: Path) -> None:
    words: list[str | Path] = ["--config_file", DDP_CPU]
    if how == "--cpu":
        words = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    if how == "MULTI_CPU":
        words[1] = tmp_path / "multi_cpu.yaml"
        words[1].write_text(DDP_CPU.read_text().replace("MULTI_GPU\n", "MULTI_CPU\n"))
    variable = None if how == "no variable" else os.environ["ACCELERATE_USE_CPU"]
    done = launch(*words, HERE / "start_ranks.py", ACCELERATE_USE_CPU=variable)
    assert done.returncode != 0 and not re.search(r"rank \d of", done.stdout), done.stdout
    expected = "accelerate launch was asked for 2 processes and started one"
    if how == "no variable":
        expected = "each would train alone. On CPU set ACCELERATE_USE_CPU=true"
    assert expected in done.stdout, done.stdout


def test_a_rank_that_raises_ends_the_run(tmp_path: Path) -> None:
    done = launch("--config_file", DDP_CPU, HERE / "start_ranks.py", "raise")  # long before Ranks' timeout
    assert done.returncode != 0 and "ArithmeticError: rank 1 fails" in done.stdout
    assert "rank 0 of 2" in done.stdout
