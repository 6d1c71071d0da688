"""The picture of a run, from whatever the run's folder has."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tools.plot import main, short
from tools.run_files import pairs, points, read_predictions, read_run


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_predictions(folder: Path, epoch: int, split: str, texts: dict[str, str]) -> None:
    rows = [
        {"sample_id": i, "prompt_text": f"p{i}", "generated_text": text, "reward": 0.5} for i, text in texts.items()
    ]
    (folder / f"epoch_{epoch}_{split}_split_predictions.json").write_text(json.dumps(rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my run"
    folder.mkdir()
    write_lines(
        folder / "rollout_info.jsonl",
        [{"iteration": i, "rollout_info/ep_rew": i / 10, "rollout_info/kl_div_mean": None} for i in (1, 2, 3)],
    )
    write_lines(folder / "metrics.jsonl", [{"iteration": i, "rollout/length": 5.0, "kl/coef": 0.1} for i in (1, 2, 3)])
    metrics = {
        "reward": 0.4,
        "length": 7,
        "diversity_metrics/distinct-1": 0.2,
        "fluency_metrics/reference_perplexity": 20,
    }
    for split in ("val", "test"):
        rows = [{"epoch": i, "iteration": i, "metrics": metrics} for i in (0, 3)]
        write_lines(folder / f"{split}_split_metrics.jsonl", rows)
    for epoch in (0, 2, 10):  # 10 is the last, though not in alphabetical order
        write_predictions(folder, epoch, "test", {"a": f"$x_{epoch}$ costs $5\n" * 30, "b": ""})
    (folder / "config.json").write_text(
        json.dumps({"alg": {"id": "ppo", "kl_div": {"coeff": 0.1}}, "datapool": {"id": "t"}})
    )
    return folder


def test_reads_both_files_of_statistics(run: Path) -> None:
    rows = read_run(run)
    assert points(rows["train"], ("rollout/reward", "rollout_info/ep_rew")) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert points(rows["train"], ("rollout/length",)) == [(1, 5), (2, 5), (3, 5)]
    assert points(rows["train"], ("rollout_info/kl_div_mean",)) == []
    assert points(rows["train"], ("not there",)) == []
    assert points(rows["val"], ("reward",)) == [(0, 0.4), (3, 0.4)]


def test_a_line_that_was_cut_off_is_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "rollout/le')
    assert len(read_run(run)["train"]) == 3


def test_predictions_of_the_first_and_the_last_evaluation(run: Path) -> None:
    split, found = read_predictions(run)
    assert split == "test" and [epoch for epoch, _ in found] == [0, 10]
    before, after = pairs(found, 10)[0]
    assert before["generated_text"].startswith("$x_0$") and after["generated_text"].startswith("$x_10$")
    assert len(pairs(found, 1)) == 1


def test_draws_a_picture(run: Path, tmp_path: Path) -> None:
    main([str(run), "--out", str(tmp_path / "other.png")])
    picture = imread(tmp_path / "other.png")
    assert picture.shape[0] > 1000 and picture.min() < 0.2


def test_needs_no_single_file(run: Path) -> None:
    for name in ("rollout_info.jsonl", "metrics.jsonl", "val_split_metrics.jsonl", "config.json"):
        (run / name).unlink()
    main([str(run)])
    assert (run / "run.png").is_file()


def test_draws_predictions_alone(tmp_path: Path) -> None:
    write_predictions(tmp_path, 0, "val", {"a": "text"})
    main([str(tmp_path)])
    assert (tmp_path / "run.png").is_file()


def test_a_folder_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, message in ((tmp_path, "is it a run's folder"), (tmp_path / "none", "there is no folder")):
        with pytest.raises(SystemExit):
            main([str(folder)])
        assert message in capsys.readouterr().err


def test_short() -> None:
    assert short("", 10) == "–"
    assert short("one  two\nthree four five six", 10) == "one two\nthree …"
