"""Metrics of RL4LMs' synthetic tasks, and the length of responses."""

from __future__ import annotations

from collections.abc import Sequence

from envs.episode import Episode
from envs.metrics.result import Result, with_mean
from envs.rewards import synthetic


def increasing_numbers(episodes: Sequence[Episode], *, min_tokens: int) -> Result:
    """The reward of the same name."""
    values = synthetic.increasing_numbers(episodes, min_tokens=min_tokens)
    return with_mean("synthetic/increasing_numbers_in_text", values)


def dates(episodes: Sequence[Episode]) -> Result:
    """The reward sentences_with_dates: the share of responses with a date."""
    return with_mean("synthetic/dates_in_text", synthetic.sentences_with_dates(episodes))


def length(episodes: Sequence[Episode]) -> Result:
    """Response tokens, end-of-sequence included."""
    return with_mean("length", [float(len(episode.response_ids)) for episode in episodes])
