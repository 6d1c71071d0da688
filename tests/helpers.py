"""Small runs for tests: their configuration, and running them in this process or through the launcher."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.batches import Rollout
from train.config import load_config
from train.ppo import update
from train.setup import Run, start

ROOT = Path(__file__).parents[1]
DDP_CPU = ROOT / "accelerate_configs" / "ddp_cpu.yaml"

BASE: dict[str, Any] = {
    "datapool": {"id": "user_code:prompts"},
    "reward_fn": {"id": "user_code:small_numbers"},
    "env": {
        "n_envs": 4,
        "n_workers": 1,
        "args": {"max_prompt_length": 6, "max_episode_length": 8, "terminate_on_eos": True},
    },
    "alg": {
        "id": "ppo",
        "args": {"n_steps": 12, "batch_size": 24, "n_epochs": 2, "learning_rate": 0.003, "micro_batch_size": 4},
        "kl_div": {"coeff": 0.1},
    },
    "train_evaluation": {"eval_batch_size": 8, "n_iters": 2, "eval_every": 1, "save_every": 1},
    "tracking": {"trackers": [], "project_name": "tests", "experiment_name": "run"},
}


def command(folder: Path, model: Path, **changes: Any) -> list[str]:
    """A script's arguments for a small run in `folder`; changes: {dotted path with __ for dots: value}."""
    path = folder / f"base{os.environ.get('RANK', '')}.json"  # JSON is YAML
    path.write_text(json.dumps(BASE))
    values = {
        "tokenizer.model_name": str(model),
        "alg.policy.args.model_name": str(model),
        "tracking.output_dir": str(folder),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return ["--config", str(path), *(f"--{name}={json.dumps(value)}" for name, value in values.items())]


@contextlib.contextmanager
def small_run(
    folder: Path, model: Path, *, value_head: float = 0.0, resume: bool = False, **changes: Any
) -> Iterator[Run]:
    """A run before its first iteration, or as it was left with `resume`.

    value_head: standard deviation of its weights, which start at 0 otherwise.
    """
    arguments = [*command(folder, model, **changes), "--resume" if resume else "--overwrite"]
    with start(load_config(arguments)) as run:
        if value_head:
            head = run.ranks.unwrap(run.model).value_head
            torch.nn.init.normal_(head.weight, std=value_head, generator=torch.Generator().manual_seed(5))
        yield run


def changed(tree: Any, **changes: Any) -> Any:
    """A frozen tree with other values: changed(config, alg__args__n_epochs=1)."""
    for name, value in changes.items():
        head, _, rest = name.partition("__")
        assert is_dataclass(tree) and head in {f.name for f in fields(tree)}, name
        tree = replace(tree, **{head: changed(getattr(tree, head), **{rest: value}) if rest else value})  # type: ignore[type-var]
    return tree


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def flat(model: torch.nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def flat_gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    return float((a.double() - b.double()).norm() / b.double().norm())


class RecordingAdamW(torch.optim.AdamW):
    """Leaves {number of steps}, {a digest of all parameters} in `folder`, a file per rank."""

    def __init__(self, groups: Any, folder: str, **kwargs: Any) -> None:
        super().__init__(groups, **kwargs)
        self.path, self.n_steps = Path(folder) / f"rank_{os.environ.get('RANK', '0')}", 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.n_steps += 1
        numbers = torch.cat([p.detach().flatten() for group in self.param_groups for p in group["params"]])
        self.path.write_text(f"{self.n_steps} {hashlib.sha256(numbers.numpy().tobytes()).hexdigest()}")
        return result


class Recording:
    """Ranks that take no optimizer steps but keep the gradients with which they would have taken them."""

    def __init__(self, ranks: Any) -> None:
        self.ranks, self.gradients = ranks, list[Tensor]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ranks, name)

    def step(self, model: torch.nn.Module, optimizer: Any, max_grad_norm: float, still: str | None = None) -> float:
        self.gradients.append(flat_gradient(model).clone())
        optimizer.zero_grad()
        return float(self.gradients[-1].norm())


def make_rollout(counts: list[int], width: int = 6, length: int = 9, seed: int = 0) -> Rollout:
    """Episodes with these numbers of counted tokens; every other tensor holds noise, also where nothing counts."""
    draw = torch.Generator().manual_seed(seed)
    batch = len(counts)
    prompt_mask = (torch.arange(width) >= torch.randint(1, width, (batch, 1), generator=draw)).long()
    floats = ("old_logprobs", "ref_logprobs", "old_values", "task_rewards", "kl", "rewards", "advantages", "returns")
    return Rollout(
        prompt_ids=torch.randint(3, 30, (batch, width), generator=draw),
        prompt_mask=prompt_mask,
        response_ids=torch.randint(3, 30, (batch, length), generator=draw),
        response_mask=torch.arange(length) < torch.tensor(counts)[:, None],
        loss_mask=torch.arange(length) < torch.tensor(counts)[:, None],
        mask_statistics=torch.rand(batch, length, 3, generator=draw),
        action_mask=torch.randint(0, 256, (batch, length, 4), generator=draw, dtype=torch.uint8),
        **{name: torch.randn(batch, length, generator=draw) for name in floats},
        lengths=torch.tensor(counts),
        bootstrap=torch.zeros(batch),
        complete=torch.ones(batch, dtype=torch.bool),
        truncated=torch.zeros(batch, dtype=torch.bool),
        indices=torch.arange(batch),
    )


def gradients(run: Run, rollout: Any, **changes: Any) -> list[Tensor]:
    """The gradient of each optimizer step of `train.ppo.update` with a changed configuration, none of them taken."""
    ranks = Recording(run.ranks)
    update(replace(run, ranks=ranks, config=changed(run.config, **changes)), replace(rollout), 1)
    return ranks.gradients


def launch(*words: str | Path, timeout: float = 150, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """`accelerate launch WORDS`; whatever it started is ended, also after a timeout, which fails the test."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}", **environment}
    process = subprocess.Popen(
        [sys.executable, Path(sys.executable).with_name("accelerate"), "launch", *map(str, words)],
        env={name: value for name, value in env.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(words, process.returncode, output)
