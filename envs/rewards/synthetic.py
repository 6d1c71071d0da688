"""Rewards that need neither data nor a model: RL4LMs' synthetic tasks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from envs.episode import Episode

DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def increasing_numbers(episodes: Sequence[Episode], *, min_tokens: int) -> list[float]:
    """How many numbers the response counts upwards before the first that is not larger, per word. In [0, 1].

    min_tokens: half of it is the least number of words to divide by, so that short responses do not score high
    """
    return [increasing_share(episode.response_text, min_tokens) for episode in episodes]


def sentences_with_dates(episodes: Sequence[Episode]) -> list[float]:
    """1 if the response contains a date written as 2022-10-03, else 0."""
    return [has_date(episode.response_text) for episode in episodes]


def increasing_share(text: str, min_tokens: int) -> float:
    """Length of the strictly increasing run that the numbers in `text` start with / max(words, min_tokens / 2)."""
    words = text.split()
    numbers = [number for number in map(_number, words) if number is not None]
    if not numbers:
        return 0.0
    run = 1
    while run < len(numbers) and numbers[run] > numbers[run - 1]:
        run += 1
    return run / max(len(words), min_tokens / 2)


def has_date(text: str) -> float:
    return float(DATE.search(text) is not None)


def _number(word: str) -> float | None:
    """The word as a finite number; "nan" and "inf" are words."""
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
