"""The file that workers read samples from."""

from pathlib import Path

import pytest

from envs.samples import Sample, SampleFile, write_samples

SAMPLES = [
    Sample("0", "plain", ["r"], {"label": 1}),
    Sample("ü", "line\nbreak \u2028 \U0001f600 \x00", [], {"nested": {"x": [1.5, None]}}),
    Sample("2", "", ["a", "b"]),
]


def test_round_trip(tmp_path: Path) -> None:
    write_samples(tmp_path / "s.jsonl", iter(SAMPLES))
    file = SampleFile(tmp_path / "s.jsonl")
    assert list(file) == SAMPLES and len(file) == 3
    assert file[-1] == SAMPLES[2] and file[1:] == SAMPLES[1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.jsonl", "s.jsonl.idx"]
    for index in (3, -4):
        with pytest.raises(IndexError, match="of 3"):
            file[index]


def test_written_again_while_open(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", SAMPLES)
    old = SampleFile(tmp_path / "s")
    write_samples(tmp_path / "s", SAMPLES[:1])
    assert list(old) == SAMPLES
    assert list(SampleFile(tmp_path / "s")) == SAMPLES[:1]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "empty"),
        ([Sample("bad one", "x", [], {"set": {1}})], "'bad one'"),
        ([Sample("surrogate", "\ud800")], "'surrogate'"),
    ],
)
def test_refused(tmp_path: Path, samples: list[Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_samples(tmp_path / "s", samples)
    assert not list(tmp_path.iterdir())


def test_index_of_another_file(tmp_path: Path) -> None:
    write_samples(tmp_path / "s", SAMPLES)
    (tmp_path / "s").write_text("something else")
    with pytest.raises(ValueError, match="do not belong together"):
        SampleFile(tmp_path / "s")
    with pytest.raises(FileNotFoundError):
        SampleFile(tmp_path / "missing")
