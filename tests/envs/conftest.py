"""Vector environments on a tiny world of a few words."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(os.path.dirname(__file__))  # for user_rewards and text_world; workers inherit it

from text_world import ENV, SAMPLES, make_tokenizer

from envs.samples import Sample, write_samples
from envs.vector import TextVectorEnv


@pytest.fixture
def init(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """init(reward, args, **env): the message that makes workers."""
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write_samples(tmp_path / "train.jsonl", SAMPLES)
    write_samples(tmp_path / "val.jsonl", [Sample(f"v{i}", "a b c", ["d"]) for i in range(40)])

    def make(reward: str | None = None, args: dict[str, Any] | None = None, **env: Any) -> dict[str, Any]:
        return {
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "splits": {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "val")},
            "reward": reward and {"id": f"user_rewards:{reward}", "args": args or {}},
            "env": {**ENV, **env},
        }

    return make


@pytest.fixture
def make_vector(init: Callable[..., dict[str, Any]]) -> Iterator[Callable[..., TextVectorEnv]]:
    """make_vector(n_envs, n_workers, reward, args, env={}, **TextVectorEnv arguments); closed after the test."""
    made: list[TextVectorEnv] = []

    def make(
        n_envs: int,
        n_workers: int,
        reward: str | None = None,
        args: dict[str, Any] | None = None,
        env: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TextVectorEnv:
        kwargs = {"seed": 7, "timeout": 60.0, **kwargs}
        made.append(TextVectorEnv(n_envs, n_workers, init=init(reward, args, **(env or {})), **kwargs))
        return made[-1]

    yield make
    for vector in made:
        vector.close()
