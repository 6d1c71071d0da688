"""Tasks, rewards and metrics as users bring them, well behaved and not: "user_code:NAME" in a configuration."""

from typing import Any

from envs.episode import Episode
from envs.samples import Sample

SPECIAL = 3  # the first tokens are padding, end of text, unknown; then come the numbers


def prompts(split: str, *, n: int = 12) -> list[Sample]:
    """Prompts of one to five numbers, each split with its own."""
    start = {"train": 0, "val": 7, "test": 11}[split]
    texts = [" ".join(str((i * 5 + j + start) % 30) for j in range(1 + (i + start) % 5)) for i in range(n)]
    return [Sample(f"{split}-{i}", text, [f"{i} {i}", "1"], {"number": i}) for i, text in enumerate(texts)]


def nothing(split: str) -> list[Sample]:
    return []


def small_numbers(episodes: list[Episode], *, below: int = 10) -> list[float]:
    """Share of the response's tokens that are numbers below `below`."""
    return [sum(SPECIAL <= token < SPECIAL + below for token in e.response_ids) / len(e.response_ids) for e in episodes]


def one(episodes: list[Episode]) -> list[float]:
    return [1.0] * len(episodes)


def each_token(episode: Episode, t: int) -> float:
    """Step-wise: a function of the token and its place."""
    return episode.response_ids[t] / 10 + t


class OnDevice:
    """Runs where the models are: the response's length and the sample's number."""

    on_device = True

    def __init__(self, scale: float, *, device: Any) -> None:
        self.scale, self.device = scale, device

    def __call__(self, episodes: list[Episode]) -> list[float]:
        assert self.device is not None and all(e.terminated or e.truncated for e in episodes)
        return [self.scale * len(e.response_ids) + e.meta["number"] for e in episodes]


class Broken:
    """No valid reward for one sample; 1.0 for the others."""

    values: dict[str, Any] = {"nan": float("nan"), "string": "good"}

    def __init__(self, how: str, sample_id: str = "val-1") -> None:
        self.how, self.sample_id = how, sample_id

    def __call__(self, episodes: list[Episode]) -> list[Any]:
        values: list[Any] = [1.0] * len(episodes)
        for i, episode in enumerate(episodes):
            if episode.sample_id == self.sample_id:
                if self.how == "count":
                    return values + values
                values[i] = self.values[self.how]
        return values


def lengths(episodes: list[Episode]) -> dict[str, tuple[list[float], float]]:
    """A metric."""
    values = [float(len(e.response_ids)) for e in episodes]
    return {"user/longest": (values, max(values))}
