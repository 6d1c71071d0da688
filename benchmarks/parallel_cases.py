"""What benchmarks/parallel_strategies.py can run: strategies, model sizes, cases and the studies that they make up."""

import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tools.make_tiny_model import build_model, numbers_tokenizer, save, wrap

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Strategy:
    """A file of accelerate_configs/ (on GPUs another, if there is one), options of the launch, keys of the run.

    together: all ranks work on the same episodes, as one. one_process: they are the GPUs of one process.
    """

    file: str
    gpu_file: str | None = None
    launch: tuple[str, ...] = ()
    gather: str = "auto"
    together: bool = False
    one_process: bool = False


STRATEGIES = {
    "single": Strategy("cpu", "single_gpu"),
    "ddp": Strategy("ddp_cpu", "ddp"),
    "zero0": Strategy("zero1", launch=("--zero_stage", "0")),
    "zero1": Strategy("zero1"),
    "zero2": Strategy("zero2"),
    "zero3": Strategy("zero3"),
    "zero3_synced": Strategy("zero3", gather="never"),
    "zero3_offload": Strategy("zero3_offload"),
    "zero3_offload_params": Strategy("zero3_offload_params"),
    "fsdp2": Strategy("fsdp2"),
    "fsdp2_synced": Strategy("fsdp2", gather="never"),
    "tensor_parallel": Strategy("tensor_parallel", together=True),
    "device_map": Strategy("device_map", together=True, one_process=True),
}
# layers, width, heads, numbers among the tokens: random Llamas, which every strategy can split.
SHAPES = {"tiny": (2, 64, 4, 1000), "small": (4, 256, 4, 8000), "medium": (6, 512, 8, 8000)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    ranks: processes, or GPUs. n_envs: environments per rank, also where all ranks work on the same episodes: those are
    of n_envs · ranks environments then. waves: episodes per environment and iteration. response, prompt: tokens; ragged
    responses end early, at EOS. accumulation: micro-batches of the one optimizer step per epoch. threads: per rank.
    model: a name in SHAPES, a folder or a hub name.
    """

    strategy: str = "ddp"
    ranks: int = 2
    model: str = "small"
    n_envs: int = 8
    waves: int = 1
    response: int = 32
    accumulation: int = 1
    threads: int = 1
    ragged: bool = False
    precision: str = "no"
    prompt: int = 16
    epochs: int = 2
    iterations: int = 4

    @property
    def name(self) -> str:
        """Of its run's folder: whatever differs from the defaults."""
        base = Case()
        parts = [self.strategy, str(self.ranks)]
        for f in fields(self)[2:]:
            if (value := getattr(self, f.name)) != getattr(base, f.name):
                parts.append(f"{f.name}_{value}".replace("/", "_"))
        return "-".join(parts)

    @property
    def processes(self) -> int:
        """That are launched."""
        return 1 if STRATEGIES[self.strategy].one_process else self.ranks

    @property
    def baseline(self) -> "Case":
        """The same on one process."""
        return replace(self, strategy="single", ranks=1)


@dataclass(frozen=True)
class Study:
    """Cases that are looked at together. title: of table and picture."""

    title: str
    cases: tuple[Case, ...]


def product(**axes: Iterable[Any]) -> tuple[Case, ...]:
    """All combinations; "single" has one process, whatever ranks say."""
    cases = [Case(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    ones = [replace(case, ranks=1) if case.strategy == "single" else case for case in cases]
    return tuple(dict.fromkeys(ones))


_SINGLE = Case(strategy="single", ranks=1)
_COMPARED = ("single", "ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2", "tensor_parallel")
STUDIES = {
    "strategies": Study("The same job on two ranks", product(strategy=(*_COMPARED, "zero3_synced", "fsdp2_synced"))),
    "size": Study(
        "The same job on two ranks, with a model four times as large",
        product(model=("medium",), strategy=_COMPARED, n_envs=(4,), iterations=(3,)),
    ),
    "ranks": Study(
        "More ranks, with as many environments on each",
        (_SINGLE, replace(_SINGLE, threads=2), *product(strategy=("ddp", "zero2", "zero3", "fsdp2"), ranks=(2, 4))),
    ),
    "envs": Study("Environments on one rank", product(strategy=("single",), n_envs=(1, 2, 4, 8, 16, 32))),
    "accumulation": Study(
        "16 episodes per optimizer step: many environments, several waves of few, gradient accumulation",
        tuple(
            replace(_SINGLE, n_envs=n_envs, waves=waves, accumulation=accumulation)
            for n_envs, waves, accumulation in ((16, 1, 1), (16, 1, 2), (16, 1, 4), (8, 2, 2), (4, 4, 4))
        )
        + product(strategy=("ddp", "zero2", "zero3"), accumulation=(1, 4)),
    ),
    "response": Study("Longer responses", product(response=(32, 64, 128), strategy=("single", "zero3"))),
    "ragged": Study(
        "Responses of different lengths: waiting for the slowest rank",
        product(ragged=(True,), strategy=("single", "ddp"), ranks=(2, 4))
        + product(ragged=(True,), strategy=("zero3", "zero3_synced")),
    ),
}
QUICK = Study(
    "A quick look",
    product(model=("tiny",), strategy=("single", "ddp", "zero2", "zero3"), ranks=(2,), n_envs=(4,), response=(8,)),
)


def model_folder(case: Case, folder: Path) -> str:
    """The case's model: what it names, or a random one in `folder`, which is made if it is not there."""
    if case.model not in SHAPES:
        return case.model
    layers, hidden, heads, words = SHAPES[case.model]
    path = folder / "models" / f"{case.model}{'_ragged' if case.ragged else ''}"
    if not (path / "tokenizer.json").is_file():
        tokenizer = wrap(numbers_tokenizer(words - 1), 512, "llama")
        shape = {"layers": layers, "hidden": hidden, "heads": heads, "positions": 512}
        model = build_model("llama", tokenizer, seed=0, **shape)
        if case.ragged:
            end_early(model, int(tokenizer.eos_token_id))
        save(path, model, tokenizer)
    return str(path)


def end_early(model: Any, eos: int) -> None:
    """Makes EOS as likely as 1 in 25 at each token: of responses of up to 32, three in four end before."""
    import torch

    with torch.no_grad():
        # All embeddings get a direction in common, so all last states have it; the head is tied to the embeddings.
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 1.0
        state = model.model(torch.arange(100)[None]).last_hidden_state[..., 0].mean()
        embedding[eos, 0] += math.log(len(embedding) / 24) / state


def config(case: Case, folder: Path) -> dict[str, Any]:
    """The run's configuration. Raises ValueError for an accumulation that does not divide the batch."""
    strategy = STRATEGIES[case.strategy]
    n_envs = case.n_envs * (case.ranks if strategy.together else 1)
    episodes = n_envs * case.waves
    if episodes % case.accumulation:
        raise ValueError(f"accumulation {case.accumulation} does not divide the {episodes} episodes of a rank")
    model = model_folder(case, folder)
    n_steps = case.waves * case.response
    args = {
        "n_steps": n_steps,
        "batch_size": n_envs * n_steps,
        "n_epochs": case.epochs,
        "learning_rate": 1e-6,
        "micro_batch_size": episodes // case.accumulation,
    }
    env = {
        "max_prompt_length": case.prompt,
        "max_episode_length": case.response,
        "terminate_on_eos": case.ragged,
    }
    policy = {"model_name": model, "device_map": "balanced" if strategy.one_process else None}
    return {
        "tokenizer": {"model_name": model},
        "datapool": {"id": "dummy_pool", "args": {"prompt": " ".join(map(str, range(case.prompt))), "n_samples": 8}},
        "reward_fn": {"id": "learned_reward", "args": {"model_name": model, "label_ix": 0}},
        "env": {"n_envs": n_envs, "args": env},
        "alg": {"id": "ppo", "args": args, "kl_div": {"coeff": 0.01}, "policy": {"args": policy}},
        "generation": {"gather": strategy.gather},
        "distributed": {"gpus_per_process": case.ranks // case.processes},
        "train_evaluation": {
            "eval_batch_size": 4,
            "max_eval_samples": 4,
            "n_iters": case.iterations,
            "eval_every": 0,
            "save_every": 1,
            "keep_last": 1,
        },
        "tracking": {
            "output_dir": str(folder),
            "project_name": "cases",
            "experiment_name": case.name,
            "trackers": [],
        },
    }


def command(case: Case, folder: Path, *, gpu: bool, options: Sequence[str] = ()) -> list[str]:
    """The launch as a command line, after its configuration was written. options: more of accelerate launch's."""
    file = folder / "cases" / f"{case.name}.json"  # JSON is YAML
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config(case, folder), indent=1))
    strategy = STRATEGIES[case.strategy]
    topology = ROOT / "accelerate_configs" / f"{(gpu and strategy.gpu_file) or strategy.file}.yaml"
    launch = [
        "--config_file",
        str(topology),
        "--num_processes",
        str(case.processes),
        "--mixed_precision",
        case.precision,
    ]
    return [
        *(sys.executable, str(Path(sys.executable).with_name("accelerate")), "launch"),
        *(*launch, *strategy.launch, *options),
        *("train/ppo.py", "--config", str(file), "--overwrite"),
    ]
