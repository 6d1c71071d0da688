"""A worker process, `python -m envs.worker FD PARENT_PID`: holds environments and answers messages on socket FD.

Commands (`cmd`) and their answers:

    init    tokenizer: path of a tokenizer.json, splits: {name: path of samples}, reward: {id, args} or null,
            env: TextEnv's keyword arguments, env_ids: numbers of the environments it holds    -> null
    kind    -> the reward's kind
    reset   envs: numbers, values: index of a sample for each     -> [{prompt_ids, prompt_text}]
    play    envs: numbers, values: token ids for each, texts      -> [{rewards, terminated, truncated, text}]
            (texts false: the text of an episode that goes on is null)
    score   split, values: [[index of a sample, token ids of a whole response]]
            -> [{rewards: [their sum], terminated, truncated, text, prompt_text}]

An exception comes back as {error, traceback, env, sample_id} and leaves the worker usable. The worker ends when the
other end of its socket is closed or its parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from envs import protocol, registry
from envs.episode import Episode
from envs.prompts import Prompt
from envs.protocol import Message
from envs.rewards import REWARDS, contract
from envs.samples import Sample, SampleFile
from envs.text_env import TextEnv, add_batched

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 0.5


class Worker:
    """The environments of one worker, and its reward function, built from an `init` message."""

    def __init__(self, init: Message) -> None:
        self.tokenizer = Tokenizer.from_file(init["tokenizer"])
        self.samples = {split: SampleFile(path) for split, path in init["splits"].items()}
        reward, self.reward_kind = _build_reward(init["reward"])
        common = (self.tokenizer, self.samples["train"], reward)
        self.rules = TextEnv(*common, **init["env"])  # for samples that are not played in an environment
        self.envs = {env: TextEnv(*common, **init["env"]) for env in init["env_ids"]}
        self.at: tuple[int | None, str | None] = (None, None)  # environment and sample at work, for errors

    def handle(self, message: Message) -> Any:
        """The results of a command, as JSON types."""
        self.at = (None, None)
        return {"kind": self.kind, "reset": self.reset, "play": self.play, "score": self.score}[message["cmd"]](message)

    def kind(self, message: Message) -> contract.Kind | None:
        return self.reward_kind

    def reset(self, message: Message) -> list[Message]:
        results = []
        for env, index in zip(message["envs"], message["values"], strict=True):
            self.at = (env, None)
            results.append(_prompt_message(self.envs[env].begin(index)))
        return results

    def play(self, message: Message) -> list[Message]:
        envs = [self.envs[env] for env in message["envs"]]
        rewards = []
        for env, ids in zip(message["envs"], message["values"], strict=True):
            self.at = (env, self.envs[env].running().sample_id)
            rewards.append(self.envs[env].take(ids))
        add_batched(envs, rewards)
        return [_played_message(env.running(), new, message["texts"]) for env, new in zip(envs, rewards, strict=True)]

    def score(self, message: Message) -> list[Message]:
        """Rewards of whole responses, of any length: one without an end-of-sequence token counts as truncated."""
        step_reward = self.rules.reward if self.reward_kind == "step" else None
        episodes, scores = [], []
        for index, ids in message["values"]:
            episode = self._start(self.samples[message["split"]][index])
            terminated = self.rules.ends_with_eos(ids)
            values = contract.extend(episode, ids, terminated=terminated, truncated=not terminated, reward=step_reward)
            scores.append(sum(values, 0.0))
            episodes.append(episode)
        if self.reward_kind == "batched":
            scores = contract.call_batched(self.rules.reward, episodes)
        return [
            {**_played_message(episode, [score], with_text=True), "prompt_text": episode.prompt_text}
            for score, episode in zip(scores, episodes, strict=True)
        ]

    def _start(self, sample: Sample) -> Episode:
        self.at = (None, sample.sample_id)
        return Episode(sample, self.rules.encode(sample).text, decode=self.tokenizer.decode)

    def describe(self, error: Exception) -> Message:
        """Which environment and sample an exception belongs to."""
        env, sample_id = self.at
        if isinstance(error, contract.RewardError):
            sample_id = error.episode.sample_id
            env = next((i for i, e in self.envs.items() if e.episode is error.episode), None)
        return {"env": env, "sample_id": sample_id}


def _build_reward(spec: Message | None) -> tuple[contract.Reward, contract.Kind | None]:
    """The reward and its kind. One that runs on the device is not built here: its place is taken by None."""
    if spec is None:
        return None, None
    if getattr(registry.resolve(spec["id"], REWARDS, "reward"), "on_device", False):
        return None, "device"
    reward = registry.build(spec["id"], spec.get("args"), REWARDS, "reward")
    return reward, contract.kind(reward)


def _prompt_message(prompt: Prompt) -> Message:
    return {"prompt_ids": prompt.ids, "prompt_text": prompt.text}


def _played_message(episode: Episode, rewards: list[float], with_text: bool) -> Message:
    ended = episode.terminated or episode.truncated
    return {
        "rewards": rewards,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "text": episode.response_text if with_text or ended else None,
    }


def serve(sock: socket.socket) -> None:
    """Answers messages until the other end of the socket is closed."""
    worker = None
    buffer = bytearray()
    while (message := protocol.receive(sock, buffer)) is not None:
        try:
            if message["cmd"] == "init":
                worker = Worker(message)
                answer: Message = {"results": None}
            else:
                assert worker is not None, "the first message must be init"
                answer = {"results": worker.handle(message)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            answer |= worker.describe(error) if worker else {"env": None, "sample_id": None}
        sock.sendall(protocol.encode(answer))


def end_with_parent(parent: int) -> None:
    """Ends this process soon after its parent (a process id) is gone, even in the middle of a reward call."""
    if sys.platform == "linux":
        # At once, also while a C extension holds the interpreter. The kernel's "parent" is the thread that started us;
        # if only that thread ends, the pool finds this worker dead and replaces it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Entry point; see the module's docstring."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with_parent(parent)
    faulthandler.enable()
    # Signals for the training process often reach its whole group or job: a worker only ever follows its parent.
    # A handler rather than SIG_IGN, which programs that a reward starts would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
        # Processes that a reward forks (multiprocessing) must be able to end each other.
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a reward prints appears at once
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    with contextlib.suppress(ConnectionError):  # the parent went away: nothing is left to do
        serve(sock)


if __name__ == "__main__":
    main()
