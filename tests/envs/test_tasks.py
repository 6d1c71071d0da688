"""Tasks: what they return, and how they say that data is missing or wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from envs.registry import build
from envs.samples import Sample
from envs.tasks import TASKS


def task(name: str, **args: Any) -> Any:
    return build(name, args, TASKS, "task", given=("split",))


def test_dummy_pool_repeats_its_prompt() -> None:
    samples = task("dummy_pool", prompt="count:", n_samples=3)(split="val")
    assert samples == [Sample(f"val_{i}", "count:", [], {}) for i in range(3)]
    assert len(task("dummy_pool", prompt="")(split="train")) == 100


def test_dummy_pool_is_not_empty() -> None:
    with pytest.raises(ValueError, match="n_samples is 0"):
        task("dummy_pool", prompt="a", n_samples=0)(split="train")


def test_jsonl_reads_a_folder(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "one ", "references": ["two", "zwei"], "id": 7, "meta": {"topic": [1, None]}},
        {"prompt": "ü\u2028", "reference": ""},
        {"prompt": ""},
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "train.jsonl").write_text(f"\ufeff{text}\n\n", encoding="utf-8")
    assert task("jsonl", path=str(tmp_path))(split="train") == [
        Sample("7", "one ", ["two", "zwei"], {"topic": [1, None]}),
        Sample("train_1", "ü\u2028", [""], {}),
        Sample("train_2", "", [], {}),
    ]


def test_jsonl_reads_named_files(tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text('{"prompt": "a"}')
    read = task("jsonl", data_files={"val": str(tmp_path / "dev.json")})
    assert [sample.prompt for sample in read(split="val")] == ["a"]
    with pytest.raises(ValueError, match="data_files has no 'test' .it has val.; add it"):
        read(split="test")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{prompt: 1}", "not JSON"),
        ('["a"]', "expected a JSON object"),
        ("{}", "there is no 'prompt'"),
        ('{"prompt": null}', "'prompt' must be a string, got null"),
        ('{"prompt": "a", "refrences": ["b"]}', "unknown key 'refrences'; did you mean 'references'"),
        ('{"prompt": "a", "zzz": 1}', "unknown key 'zzz'; what rewards and metrics need goes into 'meta'"),
        ('{"prompt": "a", "references": "b"}', "'references' must be a list of strings, got \"b\""),
        ('{"prompt": "a", "references": [1]}', "'references' must be a list of strings"),
        ('{"prompt": "a", "reference": ["b"]}', "'reference' must be a string"),
        ('{"prompt": "a", "reference": "b", "references": ["b"]}', "both 'reference' and 'references'"),
        ('{"prompt": "a", "meta": []}', "'meta' must be an object"),
        ('{"prompt": "a", "id": true}', "'id' must be a string or an integer"),
        ('{"prompt": "a", "id": "first"}', "id 'first' is already that of line 1"),
    ],
)
def test_jsonl_names_the_line_that_is_wrong(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "id": "first"}\n\n' + line)
    with pytest.raises(ValueError) as error:
        task("jsonl", path=str(tmp_path))(split="train")
    assert str(error.value).startswith(f"{tmp_path / 'train.jsonl'}, line 3: ")
    assert message in str(error.value)


def test_jsonl_needs_samples(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"val.jsonl has no samples, so the val split is empty"):
        task("jsonl", path=str(tmp_path))(split="val")


def test_jsonl_says_how_to_mend_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nowhere/train.jsonl for the train split .*correct `path`"):
        task("jsonl", path=str(tmp_path / "nowhere"))(split="train")
    with pytest.raises(ValueError, match=r"no file .*x.jsonl for the train split .*correct data_files.train"):
        task("jsonl", data_files={"train": str(tmp_path / "x.jsonl")})(split="train")
    for args in ({}, {"path": ".", "data_files": {}}):
        with pytest.raises(ValueError, match="either `path`"):
            task("jsonl", **args)(split="train")


def test_movie_reviews_says_how_to_make_its_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"python -m tools.quickstart prepare --out {tmp_path}"):
        task("movie_reviews", path=str(tmp_path))(split="train")
    (tmp_path / "train.jsonl").write_text('{"prompt": "this film", "references": ["is good."], "meta": {"label": 1}}')
    expected = Sample("train_0", "this film", ["is good."], {"label": 1})
    assert task("movie_reviews", path=str(tmp_path))(split="train") == [expected]
