"""Sentiment of the responses."""

from __future__ import annotations

import os
from collections.abc import Sequence

from envs.episode import Episode
from envs.metrics.result import Result, with_mean
from envs.rewards.bag_of_words import BagOfWords


class BagOfWordsSentiment:
    """semantic/sentiment: the probability of a positive text under a bag-of-words classifier; args as the reward's."""

    def __init__(self, path: str | os.PathLike[str], include_prompt: bool = True) -> None:
        self.classifier = BagOfWords(path, include_prompt)

    def __call__(self, episodes: Sequence[Episode]) -> Result:
        return with_mean("semantic/sentiment", self.classifier(episodes))
