"""A supervised run's folder: resumed to the same end, taken by one run at a time, replaced by one that stands."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import lines
from safetensors.torch import load_file
from supervised_world import make_world, run

from train.claim import locked
from train.supervised_resume import go_back

EACH_EPOCH = "--alg.training_args.eval_strategy=epoch"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("supervised"))


@pytest.fixture(scope="module")
def trained(world: Path) -> Path:
    """A run with dropout, so that its random numbers have to be resumed as well."""
    return run(world, "trained", EACH_EPOCH, f"--alg.model_name={world / 'dropout'}")


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("how", ["newest", "earlier"])
def test_resuming_ends_where_an_uninterrupted_run_does(how: str, world: Path, trained: Path) -> None:
    folder = world / "runs" / "p" / how
    shutil.copytree(trained, folder)
    shutil.rmtree(folder / "model")
    dropout, resume = f"--alg.model_name={world / 'dropout'}", ["--resume"]
    if how == "newest":
        shutil.rmtree(folder / "checkpoints" / "checkpoint-90")
    else:
        resume.append(str(folder / "checkpoints" / "checkpoint-75"))
    run(world, how, EACH_EPOCH, dropout, *resume)
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("val_split_metrics.jsonl", "test_split_metrics.jsonl", "training_info.jsonl"):
        assert lines(folder / name) == lines(trained / name)
    for path in trained.glob("epoch_*.json"):
        assert (folder / path.name).read_text() == path.read_text()
    with pytest.raises(ValueError, match="these keys differ: alg.training_args.eval_strategy"):
        run(world, how, dropout, "--resume")


def test_going_back_forgets_what_came_later(world: Path, trained: Path) -> None:
    folder = world / "runs" / "p" / "back"
    shutil.copytree(trained, folder)
    go_back(folder, folder / "checkpoints" / "checkpoint-75")
    assert [path.name for path in (folder / "checkpoints").glob("checkpoint-*")] == ["checkpoint-75"]
    assert [row["iteration"] for row in lines(folder / "training_info.jsonl")] == [15, 30, 45, 60, 75]
    assert lines(folder / "val_split_metrics.jsonl") == lines(trained / "val_split_metrics.jsonl")[:-1]


def test_a_resume_with_other_samples_or_ranks_is_refused(world: Path, trained: Path) -> None:
    folder, test = world / "runs" / "p" / "changed", world / "test.jsonl"
    shutil.copytree(trained, folder)
    args = [EACH_EPOCH, f"--alg.model_name={world / 'dropout'}", "--resume"]
    before, samples = contents(folder / "checkpoints"), test.read_text()
    try:
        test.write_text(samples + samples.splitlines()[0] + "\n")
        with pytest.raises(ValueError, match="was written with other samples: what datapool jsonl gives has changed"):
            run(world, "changed", *args)
    finally:
        test.write_text(samples)
    assert contents(folder / "checkpoints") == before
    state = folder / "checkpoints" / "state.json"
    described = json.loads(state.read_text())
    for other, message in (
        ({"world_size": 2}, "was written by 2 ranks; this run has 1"),
        ({"strategy": "zero2"}, "under the strategy zero2; this run's is single"),
    ):
        state.write_text(json.dumps({**described, **other}))
        with pytest.raises(ValueError, match=f"{message}.* --init_from .*checkpoints .* starts from its weights"):
            run(world, "changed", *args)


def test_a_run_can_start_from_the_weights_of_another(world: Path, trained: Path) -> None:
    def first_loss(folder: Path) -> float:
        start = run(world, "started", "--alg.training_args.max_steps=1", "--overwrite", "--init_from", str(folder))
        return float(lines(start / "val_split_metrics.jsonl")[0]["metrics"]["supervised/loss"])

    losses = {row["iteration"]: row["metrics"]["supervised/loss"] for row in lines(trained / "val_split_metrics.jsonl")}
    saved = trained / "checkpoints"
    for folder, step in ((saved / "checkpoint-75", 75), (saved, 90), (trained, 90), (trained / "model", 90)):
        assert first_loss(folder) == pytest.approx(losses[step], rel=1e-5), folder
    with pytest.raises(FileNotFoundError, match="neither a model nor a checkpoint nor the folder of a run with one"):
        first_loss(world)


def test_resuming_what_is_not_there_is_an_error(world: Path) -> None:
    for args in (["--resume"], ["--resume", str(world)]):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            run(world, "new", *args)
    assert not (world / "runs" / "p" / "new").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "holds another run: give --resume, --overwrite"),
        (["--resume=never"], "holds another run: give --resume, --overwrite"),
        (["--overwrite", "--resume"], "give one of them"),
        (["--overwrite", "--alg.training_args.learnin_rate=1"], "unknown; did you mean learning_rate"),
        (["--overwrite", "--datapool.args.path=nowhere"], "there is no file"),
        (["--overwrite", "--alg.model_name=./typo"], "there is no folder ./typo"),
        (["--overwrite", "--train_evaluation.metrics=[{id: typo}]"], "unknown metric 'typo'"),
        (["--overwrite", "--alg.generation_kwargs={max_new_tokens: 128}"], "is too much for the model"),
    ],
)
def test_a_run_is_lost_only_to_one_that_stands(args: list[str], message: str, world: Path, trained: Path) -> None:
    before = contents(trained)
    with pytest.raises(ValueError, match=message):
        run(world, "trained", *args)
    assert contents(trained) == before


def test_a_folder_that_is_no_run_or_in_use_is_left_alone(world: Path, trained: Path) -> None:
    other = world / "runs" / "p" / "not_a_run"
    other.mkdir()
    (other / "thesis.txt").write_text("")
    for config in (None, '{"model_type": "gpt2"}'):  # a model has one as well
        if config:
            (other / "config.json").write_text(config)
        with pytest.raises(ValueError, match="is not the folder of a run, so --overwrite leaves it alone"):
            run(world, "not_a_run", "--overwrite")
    assert (other / "thesis.txt").exists()
    before = contents(trained)
    with locked(trained), pytest.raises(ValueError, match="another process is running in"):
        run(world, "trained", "--overwrite")
    assert contents(trained) == before


def test_overwriting_starts_anew(world: Path, trained: Path) -> None:
    folder = world / "runs" / "p" / "anew"
    shutil.copytree(trained, folder)
    run(world, "anew", "--overwrite", "--alg.training_args.max_steps=3")
    assert [row["iteration"] for row in lines(folder / "val_split_metrics.jsonl")] == [0, 3]
    assert [path.name for path in (folder / "checkpoints").glob("checkpoint-*")] == ["checkpoint-3"]
    assert json.loads((folder / "config.json").read_text())["alg"]["training_args"]["max_steps"] == 3
    assert not list(folder.parent.glob(".replaced*"))
