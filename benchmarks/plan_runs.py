"""Measures the memory of real runs for benchmarks/plan_accuracy.py: cases, models, launches."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPT, RESPONSE, N_ENVS = 32, 96, 16
# layers, width, heads: 72 to 121 MB of weights in float32, with 10,000 tokens
SHAPES = {"gpt2": (6, 512, 8), "llama": (6, 512, 8), "t5": (4, 512, 8)}
FILES = {"single": "cpu", "ddp": "ddp_cpu"}


@dataclass(frozen=True)
class Case:
    """One run on CPUs. keys: of the configuration, by dotted path, beside those of `document`."""

    family: str
    strategy: str = "single"
    algorithm: str = "ppo"
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """That are launched."""
        return 1 if self.strategy == "single" else 2

    @property
    def name(self) -> str:
        """All that tells it from others."""
        words = [f"{path.rpartition('.')[2]} {_short(value)}" for path, value in self.keys.items()]
        return ", ".join([f"{self.family} {self.algorithm} {self.strategy}", *words])


def _short(value: Any) -> str:
    return " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value).lower()


def make_model(family: str, folder: Path, shape: tuple[int, int, int] | None = None) -> Path:
    """A random model whose words are numbers, in folder/family, unless it is there already."""
    from tools.make_tiny_model import build_model, numbers_tokenizer, save, wrap

    path, (layers, hidden, heads) = folder / family, shape or SHAPES[family]
    if not path.exists():
        tokenizer = wrap(numbers_tokenizer(9996), 256, family)
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "positions": 256}
        save(path, build_model(family, tokenizer, **sizes, seed=0), tokenizer)
    return path


def document(case: Case, model: Path, folder: Path) -> dict[str, Any]:
    """The configuration of two iterations of one full-length episode per environment: what the planner plans for."""
    kind = "seq2seq" if case.family == "t5" else "causal"
    masked = "maskable_" if case.algorithm == "nlpo" else ""
    policy = {"id": f"{masked}{kind}_lm_actor_critic_policy", "args": {"model_name": str(model)}}
    args = {"n_steps": RESPONSE, "micro_batch_size": N_ENVS, "learning_rate": 1e-6}
    if case.algorithm in ("ppo", "nlpo", "grpo"):
        args |= {"batch_size": N_ENVS * RESPONSE, "n_epochs": 1}
    return {
        "tokenizer": {"model_name": str(model)},
        "datapool": {"id": "dummy_pool", "args": {"prompt": " ".join(map(str, range(PROMPT))), "n_samples": 2}},
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": RESPONSE}},
        "env": {
            "n_envs": N_ENVS,
            "n_workers": 1,
            "args": {"max_prompt_length": PROMPT, "max_episode_length": RESPONSE},
        },
        "alg": {"id": case.algorithm, "args": args, "kl_div": {"coeff": 0.01}, "policy": policy},
        "train_evaluation": {"eval_batch_size": 2, "n_iters": 2, "eval_every": 0, "save_every": 0},
        "tracking": {"output_dir": str(folder / "runs"), "experiment_name": "measured", "trackers": []},
    }


def arguments(case: Case, folder: Path, shape: tuple[int, int, int] | None = None) -> list[str]:
    """The command line of the case's script."""
    file = folder / "measured.json"  # JSON is YAML
    file.write_text(json.dumps(document(case, make_model(case.family, folder, shape), folder)))
    return ["--config", str(file), *(f"--{path}={json.dumps(value)}" for path, value in case.keys.items())]


def measure(
    case: Case,
    folder: Path,
    *,
    shape: tuple[int, int, int] | None = None,
    returning: bool = False,
    timeout: float = 900,
) -> list[int]:
    """Runs the case: for each rank, bytes of its highest resident memory above what it has after its imports.

    returning: with an allocator that returns all that is freed, so that only memory in use is counted.
    """
    words = arguments(case, folder, shape)
    start = [sys.executable, "-m"]
    if case.processes > 1:
        yaml = ROOT / "accelerate_configs" / f"{FILES.get(case.strategy, case.strategy)}.yaml"
        start += ["accelerate.commands.launch", "--config_file", str(yaml), "--main_process_port", "0"]
        start += ["--num_processes", str(case.processes), "--module"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    env |= {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    if case.strategy.startswith("zero"):
        del env["ACCELERATE_USE_CPU"]
    for old in folder.glob("rank_*.json"):
        old.unlink()
    options = [str(folder), case.algorithm, "returning" if returning else "keeping"]
    with (folder / "measured.log").open("w") as log:
        process = subprocess.Popen(
            [*start, "benchmarks.plan_runs", *options, *words, "--overwrite"],
            env=env,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise RuntimeError(f"{case.name} failed:\n{(folder / 'measured.log').read_text()[-3000:]}")
    return [json.loads((folder / f"rank_{rank}.json").read_text())["peak"] for rank in range(case.processes)]


def status(key: str) -> int:
    """Bytes of this process' memory: VmRSS, or VmHWM, the highest since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def child(folder: str, algorithm: str, allocator: str, *argv: str) -> None:
    """A rank: imports, then runs the script and leaves what it took. Its workers are processes of their own."""
    import importlib

    import train.setup

    script = importlib.import_module(f"train.{algorithm}")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        from train.deepspeed_config import make_plugin

        make_plugin()
    if allocator == "returning":
        # M_MMAP_THRESHOLD: a block of its own for all from 64 kB on.
        train.setup.reuse_freed_memory = lambda: ctypes.CDLL("libc.so.6").mallopt(-3, 2**16)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    baseline = status("VmRSS")
    script.main(list(argv))
    found = {"baseline": baseline, "peak": status("VmHWM") - baseline}
    Path(folder, f"rank_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    child(*sys.argv[1:])
