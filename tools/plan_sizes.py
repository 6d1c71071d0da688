"""How many environments, workers and episodes in a micro-batch: from what fits, and from measured speeds."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.plan_machine import Machine
from tools.plan_probe import Probe, Speeds
from tools.plan_result import Plan, make_plan
from train.config import Config, load_config

ROOM = 0.9
"""Of a device, what is planned with."""
ENOUGH = 0.93
"""Of the best speed: what is as fast with less at a time is taken."""
HIDDEN = 0.05
"""Of the time of generation, what the workers may take."""
LARGEST = 64
"""Episodes of a micro-batch: beyond, no device gets faster."""


@dataclass(kw_only=True)
class Advice:
    """plan: with one episode in a micro-batch. ranks: that train on batches of their own as the file is meant.
    overrides: keys with their values and reasons."""

    plan: Plan
    reason: str
    ranks: int
    overrides: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def words(self) -> list[str]:
        """For the command line."""
        return [f"--{key}={json.dumps(value)}" for key, (value, _) in self.overrides.items()]

    def share(self, of_each: int) -> int:
        """What each rank does of what `ranks` ranks do with so much each."""
        return max(1, of_each * self.ranks // self.plan.setting.shares)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limits(argv: Sequence[str], machine: Machine, advice: Advice) -> tuple[int, int]:
    """(episodes to generate, episodes of a micro-batch) that fit at a time, from what each more takes."""
    one, config = advice.plan, load_config(argv)
    two = make_plan(load_config([*argv, *advice.words(), "--alg.args.micro_batch_size=2"]), one.setting, machine)
    room = ROOM * one.worst.capacity
    more = max(1.0, *(two.worst.total(phase) - one.worst.total(phase) for phase in ("update", "score")))
    micro = 1 + int((room - max(one.worst.total(phase) for phase in ("update", "score"))) / more)
    rows = one.worst.phases["generate"]
    each = sum(rows.get(row, 0.0) for row in ("key-value cache", "activations", "logits")) / config.env.n_envs
    fixed = one.worst.total("generate") - each * config.env.n_envs
    return max(1, int((room - fixed) / max(1.0, each))), max(1, min(micro, LARGEST))


def powers(most: int) -> list[int]:
    """Powers of two up to `most`, from 1 on."""
    return [2**i for i in range(most.bit_length())]


def environments(config: Config, advice: Advice, most: int) -> list[int]:
    """Numbers of environments with which the batch of all ranks stays the same, none without an episode in it."""
    tokens, group = advice.share(config.env.n_envs * config.alg.args.n_steps), group_size(config)
    episodes = max(group, math.ceil(tokens / config.env.args.max_episode_length))
    found = [n for n in range(group, max(group, min(most, episodes, 1024)) + 1, group) if tokens % n == 0]
    return [n for n in found if n & (n - 1) == 0 or n in (config.env.n_envs, found[-1])] or [group]


def group_size(config: Config) -> int:
    """Environments that answer the same prompt."""
    return int(getattr(config.alg.args, "num_generations", 1))


def fastest(speeds: Speeds) -> tuple[int, str]:
    """The smallest size that is nearly as fast as the fastest, and why."""
    top = max(speeds.values())
    n = min(n for n, speed in speeds.items() if speed >= ENOUGH * top)
    measured = ", ".join(f"{speed:,.0f} with {k}" for k, speed in speeds.items())
    return n, f"tokens/s measured: {measured}"


def choose_sizes(config: Config, advice: Advice, found: Probe | None, most: tuple[int, int]) -> None:
    """Fills in n_envs, n_steps, n_workers, micro_batch_size and batch_size. most: as `limits` says."""
    args, shares = config.alg.args, advice.plan.setting.shares
    if found is None:
        n_envs = environments(config, advice, most[0])[-1]
        micro = powers(most[1])[-1]
        why = f"the most of which the batch has whole episodes ({most[0]} would fit)"
        micro_why = f"the largest power of two that fits, up to {LARGEST}"
    else:
        n_envs, why = fastest(found.generate)
        micro, micro_why = fastest(found.update)
    n_steps = advice.share(config.env.n_envs * args.n_steps) // n_envs
    put = advice.overrides
    put["env.n_envs"] = n_envs, why
    put["alg.args.n_steps"] = n_steps, f"{n_steps * n_envs * shares:,} tokens per iteration of all ranks, as before"
    if found is not None:
        put["env.n_workers"] = _workers(config, advice, found, n_envs)
    put["alg.args.micro_batch_size"] = micro, micro_why
    if (batch := getattr(args, "batch_size", None)) is not None:
        kept = advice.share(batch)
        passes = math.ceil(math.ceil(kept / config.env.args.max_episode_length) / micro)
        why = f"{kept * shares:,} tokens per optimizer step, as before, in {passes} micro-batches of each rank"
        put["alg.args.batch_size"] = kept, why


def _workers(config: Config, advice: Advice, found: Probe, n_envs: int) -> tuple[int, str]:
    """As few as hide behind generation."""
    most = max(1, min(n_envs, cores() // advice.plan.setting.processes))
    generation = n_envs * config.env.args.max_episode_length / max(found.generate.values())
    n = min(most, max(1, math.ceil(n_envs * found.env / (HIDDEN * generation))))
    busy, wave = 1000 * found.env, f"{n_envs} episodes generate for {generation:.1f} s"
    on_device = f", the reward on the device {1000 * found.reward:.1f} ms" if found.reward else ""
    return n, f"an episode takes a worker {busy:.2f} ms{on_device}; {wave}"
