"""Any reward as a metric, also one that the run does not train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envs.episode import Episode
from envs.metrics.result import Result, with_mean
from envs.registry import build
from envs.rewards import REWARDS
from envs.rewards.contract import call_batched, extend, kind


class RewardMetric:
    """rewards/{id}: the return of each response, a step-wise reward summed over its tokens.

    id, args: as in reward_fn
    key: another name for the metric

    Raises ValueError for a reward that runs on the device.
    """

    def __init__(self, id: str, args: Mapping[str, Any] | None = None, key: str | None = None) -> None:
        self.key = key or f"rewards/{id}"
        self.reward = build(id, dict(args or {}), REWARDS, "reward")
        self.kind = kind(self.reward)
        if self.kind == "device":
            raise ValueError(f"metric reward: {id} runs on the device and cannot be a metric in this way")

    def __call__(self, episodes: Sequence[Episode]) -> Result:
        if self.kind == "batched":
            return with_mean(self.key, call_batched(self.reward, list(episodes)))
        return with_mean(self.key, [self._replay(episode) for episode in episodes])

    def _replay(self, episode: Episode) -> float:
        """The sum over tokens; at each one the reward sees the episode as it was then."""
        ids, ends = episode.response_ids, {"terminated": episode.terminated, "truncated": episode.truncated}
        again = Episode(sample=episode.sample, prompt_text=episode.prompt_text, decode=episode.decode)
        return sum(extend(again, ids, **ends, reward=self.reward))
