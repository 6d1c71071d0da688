"""What a vector of text environments gives back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.episode import Episode


@dataclass(frozen=True)
class PlayResult:
    """What playing one response in each of n environments gave; T is the length of the longest of them.

    rewards: float64 [n, T], one per token, 0 after a response's end
    lengths: int64 [n], tokens of each response
    terminated, truncated: bool [n], how each episode ended; both are False if it goes on
    episodes: each with all of its response so far
    """

    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    episodes: list[Episode]

    @property
    def texts(self) -> list[str]:
        return [episode.response_text for episode in self.episodes]


@dataclass(frozen=True)
class ScoreResult:
    """Finished episodes, and the sum of each one's rewards (0 for a reward that runs on the device)."""

    scores: list[float]
    episodes: list[Episode]

    @property
    def texts(self) -> list[str]:
        return [episode.response_text for episode in self.episodes]

    @property
    def prompt_texts(self) -> list[str]:
        return [episode.prompt_text for episode in self.episodes]
