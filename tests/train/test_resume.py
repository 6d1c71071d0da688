"""A run that was interrupted and resumed is the run that was not, bit for bit. What cannot be resumed is refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT, command, lines
from safetensors.torch import load_file, save_file

from train import checkpoint, ppo, tracking
from train.ppo import main
from train.script import run_script

N_ITERS = 4
OPTIONS: dict[str, Any] = {
    "alg__kl_div__target_kl": 0.05,
    "alg__args__lr_schedule": "linear",
    "alg__policy__args__generation_kwargs": {"top_k": 20},
    "env__args__priority_scale": 0.5,
    "reward_fn": {"id": "user_code:each_token"},
    "train_evaluation__n_iters": N_ITERS,
    "train_evaluation__eval_every": 2,
    "train_evaluation__metrics": [{"id": "diversity"}],
}


class Interrupted(BaseException):
    """What no part of a run catches."""


def contents(folder: Path) -> dict[str, Any]:
    """All that a run has written and that has to be repeatable, timings left out."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json*")):
        text = path.read_text()
        files[path.name] = lines(path) if path.suffix == ".jsonl" else json.loads(text)
    for row in files["metrics.jsonl"]:
        for name in [name for name in row if name.startswith("perf/")]:
            del row[name]
    del files["config.json"]["tracking"]
    return files


def assert_same(folder: Path, other: Path) -> None:
    """Two runs' files, checkpoints and models are the same bit for bit."""
    ours, theirs = contents(folder), contents(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == theirs[name], name
    for path in ("model/model.safetensors", f"checkpoints/checkpoint_{N_ITERS}/model.safetensors"):
        one, two = load_file(folder / path), load_file(other / path)
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one), path
    last = [place / f"checkpoints/checkpoint_{N_ITERS}" for place in (folder, other)]
    one, two = (json.loads((place / "state.json").read_text())["state"] for place in last)
    assert one == two
    one, two = (torch.load(place / "sampler.pt")["priorities"] for place in last)
    assert torch.equal(one, two) and len(set(one.tolist())) > 3


@pytest.fixture(scope="module")
def whole(models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    main(command(folder, models(), **OPTIONS))
    rows = lines(folder / "tests/run/metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert [round(row["policy/learning_rate"], 6) for row in rows] == [0.003, 0.00225, 0.0015, 0.00075]
    assert len({row["kl/coef"] for row in rows}) == N_ITERS
    return folder / "tests/run"


def interrupt(patch: pytest.MonkeyPatch, place: Any, name: str, call: int, *, after: bool = False) -> None:
    """The `call`-th call of place.name raises Interrupted, before or after it does its work."""
    original, calls = getattr(place, name), [0]

    def stops(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise Interrupted
        result = original(*args, **kwargs)
        if calls[0] == call:
            raise Interrupted
        return result

    patch.setattr(place, name, stops)


def test_interrupted_at_every_kind_of_moment(whole: Path, models: Callable[..., Path], tmp_path: Path) -> None:
    moments: list[tuple[Any, str, int, bool]] = [
        (ppo, "update", 2, False),  # in iteration 2, after its rollout; checkpoint 1 is there
        (checkpoint, "_publish", 1, False),  # iteration 2 is measured, but not saved
        (checkpoint, "_publish", 1, True),  # saved, but not pruned
        (tracking.Tracker, "log_iteration", 1, False),  # in iteration 3
        (tracking.Tracker, "log_iteration", 1, True),
        (ppo, "collect", 2, True),  # in iteration 4
        (checkpoint, "save", 1, True),  # saved for the last time
        (tracking.Tracker, "log_evaluation", 1, True),  # test is measured at the end
        (ppo, "finish", 1, True),  # done, and resumed all the same
    ]
    arguments = command(tmp_path, models(), **OPTIONS)
    for i, (place, name, call, after) in enumerate(moments):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            interrupt(patch, place, name, call, after=after)
            main([*arguments, *(["--resume"] if i else [])])
    main([*arguments, "--resume", "auto"])
    assert_same(tmp_path / "tests/run", whole)


def test_killed_at_a_random_moment(whole: Path, models: Callable[..., Path], tmp_path: Path) -> None:
    arguments = command(tmp_path, models(), **OPTIONS)
    process = subprocess.Popen(
        [sys.executable, "-m", "train.ppo", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        start_new_session=True,
    )
    try:
        first = tmp_path / "tests/run/checkpoints/checkpoint_1"
        while not first.exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.8))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert checkpoint.saved_iterations(first.parent)
    main([*arguments, "--resume"])
    assert_same(tmp_path / "tests/run", whole)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a run that ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: main(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_cannot_be_resumed_is_refused_and_nothing_is_lost(
    models: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**OPTIONS, "train_evaluation__n_iters": 1}
    arguments, folder = command(tmp_path, models(), **options), tmp_path / "tests/run"

    assert "there is no checkpoint" in refusal([*arguments, "--resume"], capsys)
    assert "there is no checkpoint" in refusal([*arguments, "--resume", str(tmp_path / "none")], capsys)
    assert not folder.exists()  # no fresh start

    main(arguments)
    before = snapshot(folder)
    unchanged = {name for name in before if not name.startswith("data/")}  # the samples are written again

    def check(message: str, *words: str) -> None:
        for word in words:
            assert word in message
        after = snapshot(folder)
        assert unchanged <= after.keys() and all(after[name] == before[name] for name in unchanged)

    check(refusal(arguments, capsys), "holds another run", "--resume", "--overwrite")
    check(refusal([*arguments, "--resume", "never"], capsys), "holds another run")
    other = [*arguments, "--alg.args.gamma=0.5", "--env.n_envs=3", "--resume"]
    check(refusal(other, capsys), "another configuration", "alg.args.gamma", "env.n_envs")
    longer = [*arguments, "--train_evaluation.n_iters=3", "--resume"]
    check(refusal(longer, capsys), "train_evaluation.n_iters")  # the learning rate depends on it
    state = folder / "checkpoints/checkpoint_1/state.json"
    state.write_text(state.read_text().replace('"world_size": 1', '"world_size": 2'))
    assert "was written by 2 ranks; this run has 1" in refusal([*arguments, "--resume"], capsys)

    main([*arguments, "--overwrite", "--alg.args.gamma=0.5"])
    assert json.loads((folder / "config.json").read_text())["alg"]["args"]["gamma"] == 0.5


def test_a_longer_run_goes_on_where_the_learning_rate_allows(models: Callable[..., Path], tmp_path: Path) -> None:
    options = {"train_evaluation__eval_every": 1, "reward_fn": {"id": "user_code:each_token"}}
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    short = command(tmp_path / "a", models(), **options, train_evaluation__n_iters=1)
    long = command(tmp_path / "b", models(), **options, train_evaluation__n_iters=2)
    main(short)
    main([*short, "--train_evaluation.n_iters=2", "--resume"])
    main(long)
    one, two = (contents(tmp_path / name / "tests/run") for name in "ab")
    assert one["metrics.jsonl"] == two["metrics.jsonl"]
    assert [row["iteration"] for row in one["test_split_metrics.jsonl"]] == [0, 1, 2]  # also measured when it was over
    assert one["epoch_2_test_split_predictions.json"] == two["epoch_2_test_split_predictions.json"]


def test_going_back_to_an_earlier_checkpoint(models: Callable[..., Path], tmp_path: Path) -> None:
    options = {"train_evaluation__keep_last": 3, "train_evaluation__eval_every": 0, "train_evaluation__n_iters": 3}
    arguments = command(tmp_path, models(), **options)
    folder = tmp_path / "tests/run"
    main(arguments)
    assert checkpoint.saved_iterations(folder / "checkpoints") == [1, 2, 3]
    back = str(folder / "checkpoints/checkpoint_1")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt(patch, ppo, "collect", 2)
        main([*arguments, "--train_evaluation.keep_last=1", "--resume", back])
    # What came after the checkpoint belongs to another past: auto must not go on from there.
    assert 2 in checkpoint.saved_iterations(folder / "checkpoints")
    assert 3 not in checkpoint.saved_iterations(folder / "checkpoints")
    assert [row["iteration"] for row in lines(folder / "metrics.jsonl")] == [1, 2]


def test_a_start_model_that_has_changed_is_no_start_to_go_on_from(
    models: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the reference, too: the KL would be to something else from there on."""
    model = tmp_path / "model"
    shutil.copytree(models(), model)
    arguments = command(tmp_path, model, train_evaluation__n_iters=1)
    main(arguments)
    weights = load_file(model / "model.safetensors")
    save_file({name: x + 1e-4 for name, x in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})
    longer = [*arguments, "--resume", "--train_evaluation.n_iters=2"]
    assert "started from another model" in refusal(longer, capsys)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    main(longer)
    assert [row["iteration"] for row in lines(tmp_path / "tests/run/metrics.jsonl")] == [1, 2]
