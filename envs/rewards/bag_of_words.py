"""Sentiment by a linear classifier over the set of words: small and fast enough for any worker.

    p(positive) = sigmoid(bias + sum of weights of the known distinct words / sqrt(number of known distinct words))

A word counts once, so repeating it does not pay. The weights are a JSON file {"bias": b, "weights": {word: w}};
`python -m tools.quickstart prepare` trains one on film reviews.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence

from envs.episode import Episode

WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def words(text: str) -> set[str]:
    """The distinct words of a text: lower-case letters with inner apostrophes."""
    return set(WORD.findall(text.lower()))


class BagOfWords:
    """Batched reward: the probability, in (0, 1), that a response is positive.

    path: the JSON file of weights
    include_prompt: judge the prompt and the response together, not the response alone

    Raises ValueError if the file is missing or is not a file of weights.
    """

    def __init__(self, path: str | os.PathLike[str], include_prompt: bool = True) -> None:
        self.bias, self.weights = load_weights(path)
        self.include_prompt = include_prompt

    def __call__(self, episodes: Sequence[Episode]) -> list[float]:
        return [self.probability(self._text(episode)) for episode in episodes]

    def probability(self, text: str) -> float:
        """Of a positive text. A text without known words gets sigmoid(bias)."""
        # Sorted, because a sum in a set's order would change in its last bits from one process to the next.
        known = [self.weights[word] for word in sorted(words(text)) if word in self.weights]
        logit = self.bias + sum(known) / math.sqrt(max(len(known), 1))
        # This form of the sigmoid cannot overflow.
        return 0.5 * (1.0 + math.tanh(0.5 * logit))

    def _text(self, episode: Episode) -> str:
        return f"{episode.prompt_text} {episode.response_text}" if self.include_prompt else episode.response_text


def load_weights(path: str | os.PathLike[str]) -> tuple[float, dict[str, float]]:
    """Bias and weights of a file. Raises ValueError that names the file and the fix."""
    hint = 'expected {"bias": number, "weights": {word: number}}'
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        bias, weights = content["bias"], content["weights"]
        return float(bias), {str(word): float(weight) for word, weight in weights.items()}
    except FileNotFoundError:
        raise ValueError(
            f"bag_of_words: there is no file {path}; `python -m tools.quickstart prepare` makes one as sentiment.json"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"bag_of_words: {path} is not a file of weights ({error!r}); {hint}") from error
