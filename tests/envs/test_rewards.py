"""Built-in rewards against values computed by hand."""

import json
import math
from pathlib import Path

import pytest

from envs.episode import Episode
from envs.registry import build
from envs.rewards import REWARDS
from envs.rewards.contract import call_batched, kind
from envs.samples import Sample


def episodes(*texts: str, prompt: str = "") -> list[Episode]:
    return [Episode(Sample(str(i), prompt), prompt, [4], True, False, text=text) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("no numbers at all", 0.0),
        ("1 2 3", 3 / 5),  # divided by min_tokens / 2, as there are fewer words
        ("1 2 3 4 5 6 7 8 9 10", 1.0),
        ("1 2 2 3 4 5", 2 / 6),  # equal is not larger, and what follows does not count
        ("5 4 6 7 8 9", 1 / 6),
        ("a 1 b 2 c d", 2 / 6),  # words between numbers do not stop the run, but are divided by
        ("-3 -2.5 1e1", 3 / 5),
        ("nan 1 inf 2", 2 / 5),  # neither is a number
        ("inf nan -inf 1e999", 0.0),
        ("1,2,3", 0.0),
        ("٣ ٤", 2 / 5),  # digits of any script
    ],
)
def test_increasing_numbers(text: str, expected: float) -> None:
    reward = build("increasing_numbers", {"min_tokens": 10}, REWARDS, "reward")
    assert kind(reward) == "batched"
    assert call_batched(reward, episodes(text)) == [pytest.approx(expected)]


def test_increasing_numbers_needs_min_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens"):
        build("increasing_numbers", {}, REWARDS, "reward")


def test_sentences_with_dates() -> None:
    reward = build("sentences_with_dates", {}, REWARDS, "reward")
    texts = ["on 2022-10-03 it", "x12022-10-035", "", "2022-1-03", "2022 -10-03", "٢٠٢٢-١٠-٠٣", "9999-99-99"]
    assert kind(reward) == "batched"
    assert call_batched(reward, episodes(*texts)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({"bias": -0.5, "weights": {"good": 2.0, "bad": -3.0, "isn't": -1.0, "film": 0.0}}))
    return str(path)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("text", "logit"),
    [
        ("", -0.5),
        ("unknown words ¡ünïcödé! 漢字", -0.5),
        ("good", 1.5),
        ("Good good GOOD, good.", 1.5),  # repeating a word does not pay
        ("good film", 2 / math.sqrt(2) - 0.5),
        ("the film isn't bad", -4 / math.sqrt(3) - 0.5),
    ],
)
def test_bag_of_words(weights: str, text: str, logit: float) -> None:
    reward = build("bag_of_words", {"path": weights, "include_prompt": False}, REWARDS, "reward")
    assert kind(reward) == "batched"
    assert call_batched(reward, episodes(text, prompt="bad")) == [pytest.approx(sigmoid(logit))]


def test_bag_of_words_judges_prompt_and_response_by_default(weights: str) -> None:
    reward = build("bag_of_words", {"path": weights}, REWARDS, "reward")
    assert reward(episodes("good", prompt="bad")) == [pytest.approx(sigmoid(-1 / math.sqrt(2) - 0.5))]


def test_bag_of_words_stays_finite(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"bias": 0, "weights": {"a": 1e9, "b": -1e9}}')
    reward = build("bag_of_words", {"path": str(tmp_path / "w.json")}, REWARDS, "reward")
    assert call_batched(reward, episodes("a", "b", "a b")) == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"bias": 1}', '{"bias": 1, "weights": []}', '{"bias": 1, "weights": {"a": "x"}}']
)
def test_bag_of_words_names_a_bad_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="bad.json is not a file of weights"):
        build("bag_of_words", {"path": str(path)}, REWARDS, "reward")


def test_bag_of_words_says_how_to_make_its_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file .*none.json; `python -m tools.quickstart prepare`"):
        build("bag_of_words", {"path": str(tmp_path / "none.json")}, REWARDS, "reward")
