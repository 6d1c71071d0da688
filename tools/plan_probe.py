"""A short look at how fast this machine is with a run's own model, task and reward: about a minute."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from algorithms.sampling import sample_responses
from envs.rewards.contract import call_batched
from train.config import load_config
from train.script import run_script
from train.setup import Run, start

SECONDS = {"generate": 20.0, "update": 25.0, "env": 8.0}
"""For each part, at most one measurement longer."""
FEW = 32
"""Tokens that are sampled to see how fast it goes."""
Speeds = dict[int, float]


@dataclass(kw_only=True)
class Probe:
    """generate, update: tokens per second, by rows at a time. env: seconds of a worker for an episode, its reward
    included; reward: seconds for an episode of a reward on the device."""

    generate: Speeds = field(default_factory=dict)
    update: Speeds = field(default_factory=dict)
    env: float = 0.0
    reward: float = 0.0


def probe(argv: Sequence[str], rows: Sequence[int], micro_rows: Sequence[int]) -> Probe:
    """Measures in a process of its own. rows, micro_rows: sizes to try, smallest first.

    Raises ValueError if the run cannot start here.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder) / "asked.json", Path(folder) / "found.json"
        asked.write_text(json.dumps([list(argv), list(rows), list(micro_rows)]))
        done = subprocess.run([sys.executable, "-m", "tools.plan_probe", str(asked), str(found)], check=False)
        if done.returncode or not found.is_file():
            raise ValueError("the run does not start here; the lines above say why")
        read = json.loads(found.read_text())
    speeds = {name: {int(n): speed for n, speed in read[name].items()} for name in ("generate", "update")}
    return Probe(**{**read, **speeds})


def measure(argv: Sequence[str], rows: Sequence[int], micro_rows: Sequence[int]) -> Probe:
    """Measures with one process and one worker; raises whatever a run would raise at its start."""
    group = getattr(load_config(argv).alg.args, "num_generations", 1)
    with tempfile.TemporaryDirectory() as folder, tqdm(total=3, desc="measuring", leave=False) as bar:
        quiet = ["--tracking.output_dir", folder, "--tracking.trackers=[]", "--env.n_workers=1"]
        config = load_config([*argv, *quiet, f"--env.n_envs={group}"])
        found = Probe()
        with contextlib.redirect_stdout(io.StringIO()), start(config) as run:
            bar.set_postfix_str("generation")
            found.generate = _speeds(rows, lambda n: _generate(run, n), SECONDS["generate"])
            bar.update()
            bar.set_postfix_str("update")
            found.update = _speeds(micro_rows, lambda n: _update(run, n), SECONDS["update"])
            bar.update()
            bar.set_postfix_str("reward")
            found.env, found.reward = _environments(run)
            bar.update()
    return found


def _speeds(sizes: Sequence[int], work: Callable[[int], int], budget: float) -> Speeds:
    """Tokens per second of each size; stops when the next one would take too long."""
    found: Speeds = {}
    began = time.perf_counter()
    work(sizes[0])  # warms up
    for n in sizes:
        before = time.perf_counter()
        tokens = work(n)
        took = time.perf_counter() - before
        found[n] = tokens / took
        if before - began + 3 * took > budget:
            break
    return found


@contextlib.contextmanager
def _synchronised(run: Run) -> Iterator[None]:
    yield
    if run.ranks.device.type == "cuda":
        torch.cuda.synchronize(run.ranks.device)


def _prompts(run: Run, rows: int) -> tuple[Tensor, Tensor]:
    envs = run.sampler.envs
    n = min(rows, len(envs.samples["train"]))
    encoded, _ = envs.prompts("train", list(range(n)))
    times = -(-rows // n)
    ids, mask = (
        torch.as_tensor(encoded[name], dtype=torch.int64, device=run.ranks.device).repeat(times, 1)[:rows]
        for name in ("prompt_ids", "prompt_mask")
    )
    return ids, mask


@torch.no_grad()
def _generate(run: Run, rows: int) -> int:
    sampler, (ids, mask) = run.sampler, _prompts(run, rows)
    n = min(sampler.spec.max_new_tokens, max(FEW, sampler.spec.min_new_tokens))
    with _synchronised(run), run.ranks.precision():
        sample_responses(
            run.ranks.unwrap(run.model).policy,
            ids,
            mask,
            torch.rand(rows, n, device=run.ranks.device),
            replace(sampler.spec, max_new_tokens=n),
            eos_token_ids=sampler.eos_token_ids,
            stop_on_eos=False,
            pad_token_id=sampler.pad_token_id,
            mask_model=run.mask_model,
        )
    return rows * n


def _update(run: Run, rows: int) -> int:
    ids, mask = _prompts(run, rows)
    n = run.sampler.spec.max_new_tokens
    responses = torch.ones(rows, n, dtype=torch.int64, device=run.ranks.device)
    recompute = run.config.alg.policy.args.gradient_checkpointing
    with _synchronised(run), run.ranks.unwrap(run.model).recomputing(recompute):
        scores: Any = run.model(ids, mask, responses, responses.bool())
        parts = [x.float().sum() for x in (scores.logprobs, scores.values) if x is not None]
        run.ranks.backward(run.model, torch.stack(parts).sum(), 1.0)
    for parameter in run.model.parameters():
        parameter.grad = None
    return rows * n


def _environments(run: Run) -> tuple[float, float]:
    envs, n = run.sampler.envs, 4
    responses = [[1] * run.sampler.spec.max_new_tokens] * n
    indices = [i % len(envs.samples["train"]) for i in range(n)]
    envs.score("train", indices, responses)  # warms up
    began, count = time.perf_counter(), 0
    while count == 0 or (time.perf_counter() - began < SECONDS["env"] / 4 and count < 64):
        episodes = envs.score("train", indices, responses).episodes
        count += n
    env = (time.perf_counter() - began) / count
    if run.sampler.device_reward is None:
        return env, 0.0
    before = time.perf_counter()
    call_batched(run.sampler.device_reward, episodes)
    return env, (time.perf_counter() - before) / n


def main() -> None:
    """What `probe` starts: from a file with its arguments to a file with what was found."""
    asked, found = map(Path, sys.argv[1:])
    found.write_text(json.dumps(asdict(measure(*json.loads(asked.read_text())))))


if __name__ == "__main__":
    run_script(main)
