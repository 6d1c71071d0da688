"""How varied the responses are as a body of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from envs.episode import Episode
from envs.metrics.result import Result

TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def tokens(text: str) -> list[str]:
    """Lower-cased words, with inner apostrophes, and single punctuation marks."""
    return TOKEN.findall(text.lower())


def distinct(texts: Iterable[Sequence[str]], n: int) -> float:
    """Distinct n-grams / n-grams of all texts together, in [0, 1]; 0 if there are none. N-grams do not span texts."""
    total, seen = 0, set()
    for text in texts:
        ngrams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        total += len(ngrams)
        seen.update(ngrams)
    return len(seen) / total if total else 0.0


def diversity(episodes: Sequence[Episode]) -> Result:
    """diversity_metrics/distinct-1, -2 and -3 of the responses. They fall as the number of responses grows: compare
    only evaluations of equally many."""
    texts = [tokens(episode.response_text) for episode in episodes]
    return {f"diversity_metrics/distinct-{n}": (None, distinct(texts, n)) for n in (1, 2, 3)}
