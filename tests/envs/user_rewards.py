"""Rewards as users write them, well behaved and not; workers find them as "user_rewards:NAME"."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from envs.episode import Episode

A = 4  # the token "a"


def stepwise(episode: Episode, t: int) -> float:
    """Depends on token, position, prompt, text, and on whether the token is the last one."""
    token = episode.response_ids[t]
    texts = 0.1 * len(episode.text_at(t)) + 0.01 * len(episode.prompt_text)
    return token / 7 + t / 3 + texts + 100 * episode.is_last(t)


def token_a(episode: Episode, t: int) -> float:
    """No text needed."""
    return 0.1 if episode.response_ids[t] == A else 0.0


def seen(episode: Episode, t: int) -> float:
    """How many tokens a step-wise reward gets to see."""
    return float(len(episode.response_ids))


class Batched:
    """1/3 per "a", and the sample's number."""

    def __init__(self, scale: float = 1 / 3) -> None:
        self.scale = scale

    def __call__(self, episodes: list[Episode]) -> list[float]:
        assert all(e.terminated or e.truncated for e in episodes)
        return [self.scale * e.response_text.count("a") + e.meta.get("number", 0) for e in episodes]


class OnDevice:
    on_device = True

    def __init__(self, device: str) -> None:
        raise AssertionError("must not be built in a worker")

    def __call__(self, episodes: list[Episode]) -> list[float]:
        raise NotImplementedError


class Returns:
    """Something that is no reward, for one sample; 1.0 for the others."""

    values: dict[str, Any] = {"nan": float("nan"), "inf": -float("inf"), "string": "1.0", "none": None, "list": [1.0]}

    def __init__(self, what: str, sample_id: str = "s1") -> None:
        self.what, self.sample_id = what, sample_id

    def __call__(self, episodes: list[Episode]) -> Any:
        values: list[Any] = [self.values[self.what] if e.sample_id == self.sample_id else 1.0 for e in episodes]
        return values


def too_many(episodes: list[Episode]) -> list[float]:
    return [0.0] * (len(episodes) + 1)


def one_number(episodes: list[Episode]) -> Any:
    return 1.0


class Raises:
    """On one sample, deep inside."""

    def __init__(self, sample_id: str) -> None:
        self.sample_id = sample_id

    def __call__(self, episode: Episode, t: int) -> float:
        return self.look_up({}, episode) if episode.sample_id == self.sample_id else 1.0

    def look_up(self, table: dict[str, float], episode: Episode) -> float:
        return table["no such key"]


class RaisesBatched(Raises):
    def __call__(self, episodes: list[Episode]) -> list[float]:  # type: ignore[override]
        return [super(RaisesBatched, self).__call__(e, 0) for e in episodes]


class Trouble:
    """Does something bad at token `at` of sample `sample_id`; otherwise like `stepwise`.

    what: die, sleep, stop (SIGSTOP), exit, hold (the interpreter's lock)
    flag: a path; it is made then, and while it is there nothing happens. None: every time.
    """

    def __init__(self, what: str, sample_id: str = "s1", at: int = 1, flag: str | None = None) -> None:
        self.what, self.sample_id, self.at, self.flag = what, sample_id, at, flag

    def __call__(self, episode: Episode, t: int) -> float:
        if episode.sample_id == self.sample_id and t == self.at and not (self.flag and Path(self.flag).exists()):
            if self.flag:
                Path(self.flag).touch()
            self.act()
        return stepwise(episode, t)

    def act(self) -> None:
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "sleep":
            time.sleep(600)
        elif self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.what == "exit":
            sys.exit(3)
        elif self.what == "hold":
            sum(range(10**12))  # keeps the interpreter's lock for hours


def prints(episode: Episode, t: int) -> float:
    print("printed by a reward")
    os.write(1, b"written by a reward\n")
    sys.stdout.flush()
    return 1.0


class NeedsArgument:
    def __init__(self, needed: int) -> None:
        self.needed = needed

    def __call__(self, episodes: list[Episode]) -> list[float]:
        return [float(self.needed)] * len(episodes)


def scaled(episode: Episode, t: int, scale: float, *, shift: float = 0.0) -> float:
    return scale + shift


def no_reward() -> float:
    return 0.0
