"""Runs under every parallel strategy: the models, the accelerate configurations, the launches and what they leave."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.state import AcceleratorState
from helpers import ROOT, command, launch
from safetensors.torch import load_file
from torch import Tensor

from tools.make_tiny_model import build_model, numbers_tokenizer, save, wrap
from train.config import load_config
from train.distributed import Ranks
from train.setup import Run, start

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "tensor_parallel")
SHARDED = ("zero3", "fsdp2")  # weights in parts, which have to come together to generate
# Without them DeepSpeed keeps parameters as small as these whole on every rank.
SHARD_ALL = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
FEW: dict[str, Any] = {
    "train_evaluation__max_eval_samples": 2,
    "train_evaluation__eval_every": 0,
    "train_evaluation__keep_last": 9,
}
# Responses of one length and one optimizer step per pass: then two ranks have the batches of one process. Those without
# EOS do not count in the losses, so that each rank has another number of tokens that do. The epsilon keeps Adam from
# making full steps out of gradients that are nothing but rounding.
WHOLE: dict[str, Any] = {
    **FEW,
    "alg__args": {"n_steps": 16, "batch_size": 999, "n_epochs": 2, "micro_batch_size": 4, "learning_rate": 0.02},
    "alg__args__critic_learning_rate": 0.05,
    "alg__args__warmup_iterations": 3,
    "alg__kl_div__target_kl": 0.05,
    "alg__policy__args__generation_kwargs": {"min_new_tokens": 7},
    "alg__policy__args__optimizer_kwargs": {"eps": 1e-3},
    "env__args__mask_truncated": True,
    "reward_fn__missing_eos_penalty": 1.0,
    "train_evaluation__n_iters": 5,
}
# Ranks differ in everything that may differ: lengths, waves, micro-batches, chunks of the head, evaluation batches.
RAGGED: dict[str, Any] = {
    **FEW,
    "alg__args": {"n_steps": 12, "batch_size": 24, "n_epochs": 2, "micro_batch_size": 4, "learning_rate": 0.001},
    "alg__args__critic_learning_rate": 0.01,
    "alg__policy__args__logits_chunk_mb": 1,
    "alg__policy__args__optimizer_kwargs": {"eps": 1e-3},
    "datapool__args": {"n": 5},
    "env__args__max_episode_length": 12,
    "env__args__priority_scale": 0.5,
    "reward_fn": {"id": "user_code:small_numbers", "args": {"below": 2048}},
    "train_evaluation__eval_batch_size": 2,
    "train_evaluation__max_eval_samples": 5,
}
EOS = 1
TIMEOUT = 280  # seconds of a launch
ENDED_BY = "Signal 9 (SIGKILL)"


def family_of(strategy: str) -> str:
    """The causal model that is trained: only some families can be split into tensor parallel parts."""
    return "llama" if strategy in ("tensor_parallel", "single_llama") else "gpt2"


def families_of(strategy: str) -> tuple[str, ...]:
    """The models that every algorithm is tried with."""
    own = {"tensor_parallel": ("llama", "gpt2", "t5"), "single_llama": ("llama",)}
    return own.get(strategy, ("gpt2", "t5"))


def alone_of(family: str) -> str:
    """The strategy of one process with the same model."""
    return "single_llama" if family == "llama" else "single"


def reference_of(strategy: str) -> str:
    """Whose batches are the same when ranks differ, so that its weights are too."""
    return {"tensor_parallel": "single_llama", "ddp": "single"}.get(strategy, "ddp")


def n_shares(strategy: str, processes: int = 2) -> int:
    """Parts of the batch: tensor parallel processes all have the whole."""
    return 1 if strategy in ("tensor_parallel", "single", "single_llama") else processes


def make_models(folder: Path) -> Path:
    """Two-layer models in folder/FAMILY, and folder/FAMILY_wide with thousands of tokens, whose responses often end
    early; returns the folder."""
    for family, wide in (("gpt2", False), ("gpt2", True), ("t5", False), ("llama", False), ("llama", True)):
        tokenizer = wrap(numbers_tokenizer(4096 if wide else 29), 32, family)
        model = build_model(family, tokenizer, layers=2, hidden=32, heads=4, positions=32, seed=0)
        if family != "t5":
            prefer(model, int(tokenizer.eos_token_id), by=2.2 if wide else 1.0)
        save(folder / f"{family}{'_wide' if wide else ''}", model, tokenizer)
    return folder


def prefer(model: Any, token: int, by: float) -> None:
    """Makes a token of tied embeddings likelier, by a direction that all states share."""
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 0.1
        embedding[token, 0] += by


def several_runs_in_one_launch() -> None:
    """The process group lives on when a run ends; the next one makes its Accelerator anew."""
    Ranks.finish = lambda self: AcceleratorState._reset_state()  # type: ignore[method-assign]


@contextlib.contextmanager
def a_run(folder: Path, model: Path, *words: str, **changes: Any) -> Iterator[Run]:
    """A run before its first iteration, or as the command line's `words` say (--resume, --init_from …)."""
    with start(load_config([*command(folder, model, **changes), *words])) as run:
        yield run


def supervised_arguments(folder: Path, model: Path, name: str, n_envs: int) -> list[str]:
    """A script's arguments for three steps of supervised training, with 16 rows in each for 8 environments."""
    path = folder / f"supervised{os.environ.get('RANK', '')}.json"
    training = {"max_steps": 3, "per_device_train_batch_size": 2 * n_envs, "learning_rate": 0.1, "optim": "sgd"}
    kind = "seq2seq" if model.name == "t5" else "causal"
    alg = {"id": "supervised", "model_type": kind, "model_name": str(model), "training_args": training}
    config = {
        "tokenizer": {"model_name": str(model)},
        "datapool": {"id": "user_code:prompts", "args": {"n": 40}},
        "alg": alg,
        "train_evaluation": {"eval_batch_size": 4, "max_eval_samples": 4},
        "tracking": {"output_dir": str(folder), "project_name": "tests", "experiment_name": name, "trackers": []},
    }
    path.write_text(json.dumps(config))
    return ["--config", str(path), "--overwrite"]


def accelerate_config(folder: Path, strategy: str) -> Path:
    """The accelerate configuration of a strategy on CPUs."""
    shared = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0, "main_process_port": 0}
    own: dict[str, Any] = {"distributed_type": "MULTI_GPU", "use_cpu": True}
    if strategy.startswith("zero"):
        stage = int(strategy.removeprefix("zero"))
        sharded = {f"stage3_{name}": 0 for name in SHARD_ALL} if stage == 3 else {}
        path = folder / f"{strategy}.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": stage, **sharded}}))
        own = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(path)}}
    if strategy in ("fsdp2", "tensor_parallel"):
        own = yaml.safe_load((ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text())
    path = folder / f"{strategy}.yaml"
    path.write_text(yaml.safe_dump({**own, **shared}))
    return path


def run_script(
    script: Path, folder: Path, strategy: str, *words: str | Path, processes: int = 2
) -> subprocess.CompletedProcess[str]:
    """Runs a script under a strategy with FOLDER STRATEGY WORDS as arguments; "single…" is a plain process."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(word) for word in (script, folder, strategy, *words)]
    if strategy.startswith("single"):
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        call = [sys.executable, *arguments]
        return subprocess.run(call, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    on_cpu = None if strategy.startswith("zero") else "true"  # with it, accelerate would run DDP instead of DeepSpeed
    options = ["--config_file", str(accelerate_config(folder, strategy)), "--num_processes", str(processes)]
    try:
        return launch(*options, *arguments, timeout=TIMEOUT, ACCELERATE_USE_CPU=on_cpu)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"hangs, or is slow: {(error.output or b'').decode()[-4000:]}") from None


def fixed_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prompts of four and responses of five tokens: (prompt_ids, prompt_mask, response_ids, response_mask)."""
    ids = torch.randint(3, 30, (3, 9), generator=torch.Generator().manual_seed(1))
    return ids[:, :4], torch.ones(3, 4, dtype=torch.int64), ids[:, 4:], torch.ones(3, 5, dtype=torch.bool)


@torch.no_grad()
def fixed_scores(run: Run) -> dict[str, Tensor]:
    """Log-probabilities and values of the fixed batch by the run's models. All ranks call it."""
    scores = run.ranks.unwrap(run.model)(*fixed_batch(), temperature=1.0)
    return {"logprobs": scores.logprobs, "values": scores.values}


@torch.no_grad()
def saved_logprobs(lm: Any) -> Tensor:
    """The same log-probabilities by a causal model as transformers loads it."""
    prompt_ids, _, response_ids, _ = fixed_batch()
    logits = lm.eval()(torch.cat([prompt_ids, response_ids], 1)).logits[:, prompt_ids.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, response_ids[:, :, None])[:, :, 0]


def starts_from(checkpoint: Path, folder: Path, model: Path, **changes: Any) -> bool:
    """Whether a run in this process starts with exactly the weights of a checkpoint."""
    expected = load_file(checkpoint / "model.safetensors")
    with a_run(folder, model, "--overwrite", f"--init_from={checkpoint}", **changes) as run:
        ours = dict(run.ranks.unwrap(run.model).named_parameters())
        return all(torch.equal(ours[name], value) for name, value in expected.items())


@torch.no_grad()
def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor], start: dict[str, Tensor] | None = None) -> float:
    """‖ours - theirs‖ / ‖theirs - start‖ over all tensors; start: 0 if not given."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    zero = torch.zeros(())
    error = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    size = sum(float((theirs[name].double() - (start[name] if start else zero)).square().sum()) for name in theirs)
    return (error / size) ** 0.5


def differing(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], tolerance: float) -> list[str]:
    """What two runs' metrics disagree on, timings left out, as text. tolerance: relative, and absolute below 1."""
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    found = []
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in [name for name in a if not name.startswith("perf/")]:
            if a[name] != b[name] and abs(a[name] - b[name]) > tolerance * max(1.0, abs(b[name])):
                found.append(f"iteration {a['iteration']}, {name}: {a[name]} is not {b[name]}")
    return found
