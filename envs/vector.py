"""Many text environments at once, in worker processes that are replaced when they fail."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer

from envs.episode import Episode
from envs.pool import EnvError, WorkerError, WorkerPool
from envs.prompts import pad_left
from envs.protocol import Message
from envs.results import PlayResult, ScoreResult
from envs.samples import Sample, SampleFile
from envs.streams import uniforms
from envs.text_env import Observation, TextEnv

__all__ = ["EnvError", "PlayResult", "ScoreResult", "TextVectorEnv", "WorkerError"]


class TextVectorEnv(VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """n_envs TextEnvs in n_workers processes; results depend neither on n_workers nor on workers that were replaced.

    init: the `init` message of envs.worker without cmd and env_ids; episodes come from its split "train"
    timeout: seconds a worker may take for one message before it is replaced (16 responses of `score` are one message)
    max_failures: deaths or timeouts of one worker in a row that end in a WorkerError
    first_env: global number of the first environment; errors and random streams use global numbers
    seed: for the samples that `reset` draws: pure functions of (seed, number of earlier resets, global number)

    There is no autoreset: the caller resets an environment whose episode has ended. After an EnvError, all have to be.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}

    def __init__(
        self,
        n_envs: int,
        n_workers: int,
        *,
        init: Message,
        timeout: float = 120.0,
        max_failures: int = 3,
        first_env: int = 0,
        seed: int,
    ) -> None:
        self.closed = True  # until there is something to close
        if min(n_envs, n_workers, max_failures) < 1 or timeout <= 0:
            raise ValueError("n_envs, n_workers and max_failures must be at least 1, and timeout more than 0")
        self.num_envs = n_envs
        self.samples = {split: SampleFile(path) for split, path in init["splits"].items()}
        self._rules = TextEnv(Tokenizer.from_file(init["tokenizer"]), self.samples["train"], None, **init["env"])
        self.sampler = self._rules.sampler  # its priorities are the caller's to update
        self.single_observation_space = self._rules.observation_space
        self.single_action_space = self._rules.action_space
        self.observation_space = batch_space(self.single_observation_space, n_envs)
        self.action_space = batch_space(self.single_action_space, n_envs)
        self._init, self._first_env, self._seed, self._n_resets = init, first_env, seed, 0
        self._indices = [-1] * n_envs
        self._episodes: list[Episode | None] = [None] * n_envs  # None: has to be reset
        self._observation: Observation = create_empty_array(self._rules.observation_space, n_envs)  # type: ignore[assignment]
        self._worker_envs = [part.tolist() for part in np.array_split(np.arange(n_envs), n_workers)]
        self._pool = WorkerPool(n_workers, self._recovery, timeout=timeout, max_failures=max_failures)
        self.closed = False
        try:
            answers = self._pool.run({worker: [{"cmd": "kind"}] for worker in range(n_workers)})
        except BaseException:
            self.close()
            raise
        self.reward_kind: str | None = answers[0][0]["results"]

    @property
    def worker_pids(self) -> list[int]:
        return self._pool.pids

    @property
    def restarts(self) -> int:
        """How many workers were replaced so far."""
        return self._pool.restarts

    def sample(self, split: str, index: int) -> Sample:
        if split not in self.samples:
            raise ValueError(f"there is no split {split!r}, only {sorted(self.samples)}")
        return self.samples[split][index]

    def prompts(self, split: str, indices: Sequence[int]) -> tuple[Observation, list[str]]:
        """prompt_ids and prompt_mask [n, P] of any samples, as `reset` would give them, and their texts."""
        prompts = [self._rules.encode(self.sample(split, index)) for index in indices]
        ids, mask = pad_left([p.ids for p in prompts], self._rules.encode.width, self._rules.pad_token_id)
        return {"prompt_ids": ids, "prompt_mask": mask}, [p.text for p in prompts]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts new episodes; infos: sample_id, index.

        seed: starts the stream of samples again, from this seed
        options: indices [n_envs], of samples (default: drawn); reset_mask [n_envs], whom to reset (default: all)
        """
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._n_resets = seed, 0
        mask, indices = self._reset_options(**(options or {}))
        self._n_resets += 1
        chosen = {env: int(indices[env]) for env in np.flatnonzero(mask).tolist()}
        for env in chosen:
            self._episodes[env] = None
        infos: dict[str, Any] = {}
        for env, result in self._ask("reset", chosen).items():
            self._indices[env] = chosen[env]
            sample = self.samples["train"][chosen[env]]
            self._episodes[env] = Episode(sample, result["prompt_text"], decode=self._rules.tokenizer.decode)
            self._observe_prompt(env, result["prompt_ids"])
            infos = self._add_info(infos, {"sample_id": sample.sample_id, "index": chosen[env]}, env)
        return self._copy_observation(), infos

    def step(self, actions: ArrayLike) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Appends actions[i], a token, to episode i. When episode i ends, infos["episode"][i] is the whole Episode.

        Raises RuntimeError if an environment has to be reset first, EnvError for an exception in a worker.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(f"actions must be {self.num_envs} integers, got {actions.dtype} {actions.shape}")
        played = self._play([[token] for token in actions.tolist()], "step")
        infos: dict[str, Any] = {}
        for env in np.flatnonzero(played.terminated | played.truncated).tolist():
            infos = self._add_info(infos, {"episode": played.episodes[env]}, env)
        return self._copy_observation(), played.rewards[:, 0], played.terminated, played.truncated, infos

    def play(self, responses: Sequence[Sequence[int] | NDArray[np.int64]]) -> PlayResult:
        """Appends responses[i] to episode i: the same results as `step` for each token, in one message per worker.

        A response may be empty, and may stop before its episode ends. Raises as `step` does.
        """
        if len(responses) != self.num_envs:
            raise ValueError(f"{len(responses)} responses for {self.num_envs} environments")
        return self._play([list(map(operator.index, ids)) for ids in responses], "play")

    def score(
        self, split: str, indices: Sequence[int], responses: Sequence[Sequence[int] | NDArray[np.int64]]
    ) -> ScoreResult:
        """Rewards of whole responses of any length to any samples, dealt over the workers; running episodes stay as
        they are. A response without an end-of-sequence token counts as truncated. Raises EnvError.
        """
        samples = [self.sample(split, index) for index in indices]
        ids = [list(map(operator.index, response)) for response in responses]
        results = self._pool.deal([*zip(map(int, indices), ids, strict=True)], cmd="score", split=split)
        episodes = [
            self._episode(sample, result["prompt_text"], response, result)
            for sample, response, result in zip(samples, ids, results, strict=True)
        ]
        return ScoreResult([result["rewards"][0] for result in results], episodes)

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()

    def __enter__(self) -> TextVectorEnv:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _episode(self, sample: Sample, prompt_text: str, ids: list[int], result: Message) -> Episode:
        decode = self._rules.tokenizer.decode
        return Episode(
            sample, prompt_text, ids, result["terminated"], result["truncated"], decode=decode, text=result["text"]
        )

    def _observe_prompt(self, env: int, prompt_ids: list[int]) -> None:
        ids, mask = pad_left([prompt_ids], self._rules.encode.width, self._rules.pad_token_id)
        self._observation["prompt_ids"][env], self._observation["prompt_mask"][env] = ids[0], mask[0]
        self._observation["response_ids"][env] = self._rules.pad_token_id
        self._observation["response_mask"][env] = 0

    def _copy_observation(self) -> Observation:
        return {key: array.copy() for key, array in self._observation.items()}

    def _reset_options(
        self, indices: ArrayLike | None = None, reset_mask: ArrayLike | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """(mask, indices), both [n_envs]."""
        n, numbers = len(self.samples["train"]), range(self._first_env, self._first_env + self.num_envs)
        if indices is None:
            indices = self.sampler.draw([uniforms(self._seed, "reset", self._n_resets, i, size=1)[0] for i in numbers])
        indices = np.asarray(indices)
        mask = np.ones(self.num_envs, bool) if reset_mask is None else np.asarray(reset_mask, bool)
        if mask.shape != (self.num_envs,) or indices.shape != mask.shape or indices.dtype.kind not in "iu":
            raise ValueError(f"reset_mask must be {self.num_envs} booleans, and indices as many integers")
        if ((indices[mask] < 0) | (indices[mask] >= n)).any():
            raise ValueError(f"indices must be in [0, {n}), got {indices}")
        return mask, indices

    def _play(self, responses: list[list[int]], caller: str) -> PlayResult:
        episodes = [self._ready(env, ids, caller) for env, ids in enumerate(responses)]
        results = self._ask("play", dict(enumerate(responses)), texts=caller == "play")
        lengths = np.array([len(ids) for ids in responses])
        rewards = np.zeros((self.num_envs, lengths.max()))
        for env, (before, ids) in enumerate(zip(episodes, responses, strict=True)):
            new = slice(len(before.response_ids), len(before.response_ids) + len(ids))
            self._observation["response_ids"][env, new] = ids
            self._observation["response_mask"][env, new] = 1
            rewards[env, : len(ids)] = results[env]["rewards"]
            episodes[env] = self._episode(before.sample, before.prompt_text, before.response_ids + ids, results[env])
        self._episodes = [*episodes]
        terminated, truncated = (np.array([getattr(e, how) for e in episodes]) for how in ("terminated", "truncated"))
        return PlayResult(rewards, lengths, terminated, truncated, episodes)

    def _ready(self, env: int, ids: list[int], caller: str) -> Episode:
        episode, number = self._episodes[env], self._first_env + env
        if episode is None:
            raise RuntimeError(f"{caller}() before reset(): environment {number} has no episode, or an error ended it")
        if ids and (episode.terminated or episode.truncated):
            raise RuntimeError(f"{caller}(): the episode of environment {number} has ended; reset() it first")
        return episode

    def _message(self, command: str, envs: list[int], values: dict[int, Any], **extra: Any) -> Message:
        envs_values = {"envs": [self._first_env + env for env in envs], "values": [values[env] for env in envs]}
        return {"cmd": command, **envs_values, **extra}

    def _ask(self, command: str, values: dict[int, Any], **extra: Any) -> dict[int, Message]:
        """Sends each environment in `values` a command, and returns their results."""
        parts = [[env for env in own if env in values] for own in self._worker_envs]
        scripts = {w: [self._message(command, part, values, **extra)] for w, part in enumerate(parts) if part}
        try:
            answers = self._pool.run(scripts)
        except BaseException:  # some environments may have done it, others not
            self._episodes = [None] * self.num_envs
            raise
        return {env: result for w in answers for env, result in zip(parts[w], answers[w][0]["results"], strict=True)}

    def _recovery(self, worker: int) -> list[Message]:
        """What takes a new worker process to where the parent believes it to be."""
        own = self._worker_envs[worker]
        tokens = {env: episode.response_ids for env in own if (episode := self._episodes[env])}
        return [
            {**self._init, "cmd": "init", "env_ids": [self._first_env + env for env in own]},
            self._message("reset", [*tokens], dict(enumerate(self._indices))),
            self._message("play", [*tokens], tokens, texts=False),
        ]
