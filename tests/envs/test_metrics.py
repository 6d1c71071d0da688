"""Built-in metrics against values computed by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from envs.episode import Episode
from envs.metrics import METRICS
from envs.metrics.diversity import distinct, tokens
from envs.registry import build
from envs.samples import Sample


def episodes(*texts: str) -> list[Episode]:
    sample = Sample("0", "p")
    return [Episode(sample, "p", list(range(len(text.split()) + 1)), True, False, text=text) for text in texts]


def metric(name: str, **args: Any) -> Any:
    return build(name, args, METRICS, "metric", given=("episodes",))


def test_tokens() -> None:
    assert tokens("It's GOOD, isn’t it?!") == ["it's", "good", ",", "isn’t", "it", "?", "!"]
    assert tokens("Ünïcode 漢字 ") == ["ünïcode", "漢字"]


def test_distinct() -> None:
    texts = [["a", "b", "a", "b"], ["a", "c"]]
    # 6 unigrams of 3 kinds; bigrams ab ba ab ac, none across texts; trigrams aba bab.
    assert [distinct(texts, n) for n in (1, 2, 3, 4, 5)] == [3 / 6, 3 / 4, 1.0, 1.0, 0.0]


def test_diversity() -> None:
    same = metric("diversity")(episodes(*["a fine film."] * 4))
    # Each text is a, fine, film and a full stop.
    assert same == {
        "diversity_metrics/distinct-1": (None, 4 / 16),
        "diversity_metrics/distinct-2": (None, 3 / 12),
        "diversity_metrics/distinct-3": (None, 2 / 8),
    }
    for nothing in ([], episodes("", "")):
        assert {value for _, value in metric("diversity")(nothing).values()} == {0.0}


def test_length_counts_tokens_with_eos() -> None:
    assert metric("length")(episodes("a b", "")) == {"length": ([3.0, 1.0], 2.0)}
    assert metric("length")([]) == {"length": ([], 0.0)}


def test_synthetic() -> None:
    numbers = metric("increasing_numbers", min_tokens=4)(episodes("1 2 3 4", "b", ""))
    assert numbers == {"synthetic/increasing_numbers_in_text": ([1.0, 0.0, 0.0], pytest.approx(1 / 3))}
    dates = metric("dates")(episodes("2020-01-02", "2020-1-2"))
    assert dates == {"synthetic/dates_in_text": ([1.0, 0.0], 0.5)}


def test_bag_of_words(tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({"bias": 0.0, "weights": {"good": 100.0, "bad": -100.0}}))
    result = metric("bag_of_words", path=str(path))(episodes("good", "bad", ""))
    assert result == {"semantic/sentiment": ([pytest.approx(1.0), pytest.approx(0.0), 0.5], pytest.approx(0.5))}


def stepwise(episode: Episode, t: int, scale: float = 1.0) -> float:
    """Sees only the tokens so far; pays when the episode ends, too."""
    assert len(episode.response_ids) == t + 1
    return scale * len(episode.text_at(t)) + 100 * episode.is_last(t)


def test_any_reward_is_a_metric() -> None:
    batched = metric("reward", id="increasing_numbers", args={"min_tokens": 4})
    assert batched(episodes("1 2")) == {"rewards/increasing_numbers": ([1.0], 1.0)}
    step = metric("reward", id=f"{__name__}:stepwise", args={"scale": 2.0}, key="mine")
    episode = Episode(Sample("0", "p"), "p", [7, 8, 9], True, False, decode=lambda ids: "x" * len(ids))
    assert step([episode]) == {"mine": ([2.0 * (1 + 2 + 3) + 100], 112.0)}
    assert len(episode.response_ids) == 3


class OnDevice:
    on_device = True

    def __call__(self, episodes: list[Episode]) -> list[float]:
        return []


def test_a_reward_on_the_device_is_no_metric() -> None:
    with pytest.raises(ValueError, match="runs on the device"):
        metric("reward", id=f"{__name__}:OnDevice")
