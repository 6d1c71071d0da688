"""The three shapes of a reward function, and the only place that calls one.

A reward is a function or an object with `__call__`, told apart by its required positional parameters:

    (episode, t) -> float         step-wise: called at every token t of an episode
    (episodes) -> list of floats  batched: called with finished episodes; one value each, placed on the last token
    batched with `on_device = True` as class attribute: runs where the models are, not in a worker; it gets the keyword
                                  `device` when it is built, and the environment itself gives 0.0

A batched value must not depend on which other episodes are in the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from envs.episode import Episode

Kind = Literal["step", "batched", "device"]
Reward = Any  # a callable of one of the three shapes; `kind` tells which


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is not one finite number per episode."""

    def __init__(self, reward: Reward, episode: Episode, problem: str) -> None:
        super().__init__(f"reward {name(reward)} on sample {episode.sample_id!r}: {problem}")
        self.episode = episode


def name(reward: Reward) -> str:
    """The name of a reward's function or class, for messages."""
    while isinstance(reward, partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))


def kind(reward: Reward) -> Kind:
    """The shape of a reward: an object, a function, or a class that is not built yet. Raises ValueError."""
    is_class = inspect.isclass(reward)
    parameters = inspect.signature(reward.__call__ if is_class else reward).parameters.values()
    required = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is inspect.Parameter.empty
    ][is_class:]
    on_device = getattr(reward, "on_device", False)
    if len(required) == 1:
        return "device" if on_device else "batched"
    if len(required) == 2 and not on_device:
        return "step"
    raise ValueError(
        f"reward {name(reward)} takes the positional arguments ({', '.join(required)}); a reward takes (episode, t)"
        " and returns a number, or takes (episodes) and returns one number for each (always this if it is on_device)"
    )


def check_values(values: Any, episodes: Sequence[Episode], reward: Reward) -> list[float]:
    """Values of a batched reward as floats. Raises RewardError if they are not one finite number per episode."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RewardError(reward, episodes[0], f"returned {values!r} instead of one number per episode")
    values = list(values)
    if len(values) != len(episodes):
        raise RewardError(reward, episodes[0], f"returned {len(values)} values for {len(episodes)} episodes")
    return [_number(value, episode, reward) for value, episode in zip(values, episodes, strict=True)]


def call_step(reward: Reward, episode: Episode, t: int) -> float:
    """One value of a step-wise reward. Raises RewardError."""
    try:
        value = reward(episode, t)
    except Exception as error:
        raise RewardError(reward, episode, f"token {t}: {type(error).__name__}: {error}") from error
    return _number(value, episode, reward)


def call_batched(reward: Reward, episodes: Sequence[Episode]) -> list[float]:
    """Values of a batched reward, in the order of the episodes. Raises RewardError for the episode that is to blame."""
    if not episodes:
        return []
    try:
        return check_values(reward(episodes), episodes, reward)
    except Exception as error:
        problem = error
    if len(episodes) > 1:  # one by one, to find the episode that is to blame
        for episode in episodes:
            call_batched(reward, [episode])
    if isinstance(problem, RewardError):
        raise problem
    raise RewardError(reward, episodes[0], f"{type(problem).__name__}: {problem}") from problem


def extend(episode: Episode, ids: Sequence[int], *, terminated: bool, truncated: bool, reward: Reward) -> list[float]:
    """Appends tokens, of which the last one may end the episode. Returns the step-wise reward of each token.

    reward: the step-wise reward, or None for zeros (a batched value is added by the caller when the episode has ended).
    """
    if reward is None or not ids:
        episode.response_ids.extend(ids)
        episode.terminated, episode.truncated = terminated, truncated
        return [0.0] * len(ids)
    rewards = []
    for i, token in enumerate(ids):
        episode.response_ids.append(token)
        if i == len(ids) - 1:
            episode.terminated, episode.truncated = terminated, truncated
        rewards.append(call_step(reward, episode, len(episode.response_ids) - 1))
    return rewards


def _number(value: Any, episode: Episode, reward: Reward) -> float:
    try:
        number = value.item() if hasattr(value, "item") else value  # a numpy scalar, a tensor with one element
        if isinstance(number, int | float) and math.isfinite(number):
            return float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise RewardError(reward, episode, f"returned {value!r}, which is not a finite number")
