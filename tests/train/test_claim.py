"""A run's folder is one run's, and nothing in it is lost by a start that fails."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import command, lines, small_run

from train.ppo import main

Models = Callable[..., Path]


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def finished(models: Models, tmp_path: Path) -> Path:
    """The folder of a run that is done."""
    main(command(tmp_path, models(), train_evaluation__n_iters=1))
    return tmp_path / "tests/run"


def test_overwriting_deletes_a_run_only_when_the_new_one_stands(finished: Path, models: Models, tmp_path: Path) -> None:
    before = contents(finished)
    for change in ({"reward_fn__id": "typo:x"}, {"alg__policy__args__model_name": "./typo"}):
        with pytest.raises(ValueError, match="typo"):
            main([*command(tmp_path, models(), **change), "--overwrite"])
        assert contents(finished) == before
    main([*command(tmp_path, models(), train_evaluation__n_iters=2), "--overwrite"])
    assert [row["iteration"] for row in lines(finished / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in finished.parent.iterdir()] == ["run"]


def test_overwriting_leaves_a_folder_alone_that_is_no_run(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "tests/run"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "model.safetensors").write_text("weights")
    before = contents(folder)
    with pytest.raises(ValueError, match="is not the folder of a run, so --overwrite leaves it alone"):
        main([*command(tmp_path, models()), "--overwrite"])
    assert contents(folder) == before


@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_a_folder_in_which_a_run_is_going_on_is_not_taken(option: str, models: Models, tmp_path: Path) -> None:
    with small_run(tmp_path, models()) as run:
        run.save()
        before = contents(run.folder)
        with pytest.raises(ValueError, match="another process is running in"):
            main([*command(tmp_path, models()), option])
        assert contents(run.folder) == before


def test_resume_and_overwrite_together_are_refused(finished: Path, models: Models, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        main([*command(tmp_path, models()), "--resume", "--overwrite"])


def test_a_refused_resume_changes_no_file(finished: Path, models: Models, tmp_path: Path) -> None:
    before = contents(finished)
    with pytest.raises(ValueError, match="these keys differ: datapool.args"):
        main([*command(tmp_path, models(), datapool__args={"n": 5}, train_evaluation__n_iters=1), "--resume"])
    assert contents(finished) == before
