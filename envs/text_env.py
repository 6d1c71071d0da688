"""Text generation as a token-level Markov decision process: a state is prompt and response, an action is a token."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from tokenizers import Tokenizer

from envs.episode import Episode
from envs.prompts import Prompt, PromptEncoder, pad_left
from envs.rewards import contract
from envs.rewards.contract import Reward
from envs.sampler import PrioritySampler
from envs.samples import Sample

Observation = dict[str, NDArray[np.int64]]


class TextEnv(gymnasium.Env[Observation, Any]):
    """One prompt per episode; each step appends one token to the response.

    An observation has int64 prompt_ids, prompt_mask [P] (padding on the left) and response_ids, response_mask [T]
    (padding on the right); P = max_prompt_length (+ 1 with context_start_token) and T = max_episode_length.
    An episode is terminated by an end-of-sequence token (if terminate_on_eos) and otherwise truncated at T tokens.

    samples: any sequence of Sample; one is read at each reset
    reward: see envs.rewards.contract; None gives zeros, as does a reward that runs on the device
    eos_token_ids, pad_token_id: of the model, within vocab_size
    max_prompt_length, prompt_truncation_side, context_start_token, empty_prompt_token: see envs.prompts.PromptEncoder
    priority_scale: see envs.sampler.PrioritySampler
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self,
        tokenizer: Tokenizer,
        samples: Sequence[Sample],
        reward: Reward,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        max_prompt_length: int,
        max_episode_length: int,
        terminate_on_eos: bool = False,
        context_start_token: int | None = None,
        prompt_truncation_side: Literal["left", "right"] = "left",
        priority_scale: float = 0.0,
        empty_prompt_token: int | None = None,
    ) -> None:
        for token in (pad_token_id, *eos_token_ids, context_start_token, empty_prompt_token):
            if token is not None and not 0 <= token < vocab_size:
                raise ValueError(f"special token {token} is outside the model's vocabulary of {vocab_size}")
        if max_episode_length < 1:
            raise ValueError(f"max_episode_length must be at least 1, got {max_episode_length}")
        self.tokenizer = tokenizer
        self.samples = samples
        self.reward = reward
        self.kind = None if reward is None else contract.kind(reward)
        self.priority_scale = priority_scale
        self.encode = PromptEncoder(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_length=max_prompt_length,
            truncation_side=prompt_truncation_side,
            context_start_token=context_start_token,
            empty_prompt_token=empty_prompt_token,
        )
        self.vocab_size = vocab_size
        self.pad_token_id = pad_token_id
        self.max_episode_length = max_episode_length
        self.terminate_on_eos = terminate_on_eos
        self.eos_token_ids = frozenset(eos_token_ids)
        self.observation_space = spaces.Dict(  # type: ignore[assignment]  # gymnasium types it as a dict of spaces
            {
                f"{part}_{what}": spaces.Box(0, high, (length,), np.int64)
                for part, length in (("prompt", self.encode.width), ("response", max_episode_length))
                for what, high in (("ids", vocab_size - 1), ("mask", 1))
            }
        )
        self.action_space = spaces.Discrete(vocab_size)
        self.episode: Episode | None = None
        self._prompt = Prompt([], "")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode from sample options["index"], or from a drawn one. info: sample_id, index."""
        super().reset(seed=seed)
        index = (options or {}).get("index")
        if index is None:
            index = self.sampler.draw(self.np_random.random(1))[0]
        self.begin(int(index))
        assert self.episode is not None
        return self._observation(), {"sample_id": self.episode.sample_id, "index": int(index)}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Appends one token. When the episode ends, info["episode"] is the whole Episode.

        Raises RuntimeError before the first reset, ValueError after the end or for a token outside the vocabulary.
        """
        rewards, terminated, truncated = self.play([int(action)])
        info = {"episode": self.episode} if self.has_ended else {}
        return self._observation(), float(rewards[0]), terminated, truncated, info

    def play(self, ids: Sequence[int]) -> tuple[NDArray[np.float64], bool, bool]:
        """Appends any number of tokens: (rewards [len(ids)], terminated, truncated), the same as `step` for each.

        Raises as `step` does, before any token is appended.
        """
        rewards = self.take(ids)
        add_batched([self], [rewards])
        episode = self.running()
        return np.asarray(rewards, dtype=np.float64), episode.terminated, episode.truncated

    @cached_property
    def sampler(self) -> PrioritySampler:
        """Made when it is first used: in a worker, which is told what to play, it never is."""
        return PrioritySampler(len(self.samples), self.priority_scale)

    @property
    def has_ended(self) -> bool:
        return self.episode is not None and (self.episode.terminated or self.episode.truncated)

    def begin(self, index: int) -> Prompt:
        """Starts an episode from sample `index`, without the arrays that `reset` makes."""
        self.episode = None
        sample = self.samples[index]
        self._prompt = self.encode(sample)
        self.episode = Episode(sample, self._prompt.text, decode=self.tokenizer.decode)
        return self._prompt

    def take(self, ids: Sequence[int]) -> list[float]:
        """Appends tokens and returns their step-wise rewards; the value of a batched reward is not in it."""
        episode = self.running()
        ids = list(map(operator.index, ids))  # plain integers: numpy's are slow in loops and are not JSON
        if not ids:
            return []
        terminated, truncated = self._outcome(episode, ids)
        reward = self.reward if self.kind == "step" else None
        return contract.extend(episode, ids, terminated=terminated, truncated=truncated, reward=reward)

    def ends_with_eos(self, ids: Sequence[int]) -> bool:
        """Whether a whole response was terminated. Raises ValueError if it goes on after its end-of-sequence token."""
        if not self.terminate_on_eos or self.eos_token_ids.isdisjoint(ids):
            return False
        if not self.eos_token_ids.isdisjoint(ids[:-1]):
            raise ValueError("a response goes on after its end-of-sequence token")
        return True

    def running(self) -> Episode:
        """The episode since the last reset. Raises RuntimeError if there was none."""
        if self.episode is None:
            raise RuntimeError("there is no episode: call reset() first")
        return self.episode

    def _outcome(self, episode: Episode, ids: Sequence[int]) -> tuple[bool, bool]:
        """Whether the episode is (terminated, truncated) with these tokens. Raises ValueError if they do not fit."""
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"tokens must be in [0, {self.vocab_size}), got {min(ids)} to {max(ids)}")
        room = 0 if self.has_ended else self.max_episode_length - len(episode.response_ids)
        terminated = False
        if self.terminate_on_eos and not self.eos_token_ids.isdisjoint(ids):
            n_to_eos = next(i for i, token in enumerate(ids) if token in self.eos_token_ids) + 1
            terminated = n_to_eos <= room
            room = min(room, n_to_eos)
        if len(ids) > room:
            raise ValueError(f"sample {episode.sample_id!r}: {len(ids)} tokens, but the episode ends after {room}")
        return terminated, len(ids) == room and not terminated

    def _observation(self) -> Observation:
        prompt_ids, prompt_mask = pad_left([self._prompt.ids], self.encode.width, self.pad_token_id)
        response_ids = np.full(self.max_episode_length, self.pad_token_id, dtype=np.int64)
        response_mask = np.zeros(self.max_episode_length, dtype=np.int64)
        tokens = self.running().response_ids
        response_ids[: len(tokens)] = tokens
        response_mask[: len(tokens)] = 1
        return {
            "prompt_ids": prompt_ids[0],
            "prompt_mask": prompt_mask[0],
            "response_ids": response_ids,
            "response_mask": response_mask,
        }


def add_batched(envs: Sequence[TextEnv], rewards: Sequence[list[float]]) -> None:
    """Puts the value of a batched reward on the last token of the `rewards` that `take` gave, if it ends an episode.

    The environments share one reward; it is called once.
    """
    if not envs or envs[0].kind != "batched":
        return
    ended = [(env, new) for env, new in zip(envs, rewards, strict=True) if new and env.has_ended]
    values = contract.call_batched(envs[0].reward, [env.running() for env, _ in ended])
    for (_, new), value in zip(ended, values, strict=True):
        new[-1] = value
