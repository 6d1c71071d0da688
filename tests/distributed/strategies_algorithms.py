"""Two iterations of every algorithm, as a job of strategies_jobs.py: a run for each algorithm and model family, or
FOLDER/ALGORITHM_FAMILY.refused with the reason."""

from pathlib import Path
from typing import Any

import torch
from algorithm_runs import ALGORITHMS, options_of, script_of
from strategy_runs import FEW, a_run, supervised_arguments

from train import supervised
from train.config import load_config

# Responses of one length, so that the batch is the same episodes on one process and on two; plain SGD, because adaptive
# steps make much of the last digit of a gradient; one optimizer step per pass.
SAME_BATCH: dict[str, Any] = {
    **FEW,
    "alg__policy__args__generation_kwargs": {"min_new_tokens": 8},
    "alg__policy__args__optimizer_class": "SGD",
    "train_evaluation__n_iters": 2,
    "train_evaluation__save_every": 0,
    "train_evaluation__generation_kwargs": {"max_new_tokens": 1},
}


def train_all(folder: Path, models: Path, n_envs: int, families: tuple[str, ...], *, alone: bool) -> None:
    """Every algorithm with every family. alone: the weights before training are saved too."""
    for family in families:
        for algorithm in [*ALGORITHMS, "supervised"]:
            name = f"{algorithm}_{family}"
            try:
                if algorithm == "supervised":
                    supervised.train(load_config(supervised_arguments(folder, models / family, name, n_envs)))
                else:
                    train(folder, models / family, name, alone, **options(algorithm, family, n_envs))
            except ValueError as error:
                (folder / f"{name}.refused").write_text(str(error))
            except RuntimeError as error:
                if "its message says why" not in str(error):  # of the ranks that rank 0 tells
                    raise


def options(algorithm: str, family: str, n_envs: int) -> dict[str, Any]:
    """Changes that make the tests' base configuration a run of the algorithm."""
    args: dict[str, Any] = {"n_steps": 8, "learning_rate": 0.5, "micro_batch_size": 4}
    if algorithm != "a2c":
        args["batch_size"] = 999
    if algorithm == "trpo":  # many steps of the conjugate gradient make more of rounding than a gradient does
        args |= {"cg_max_steps": 5, "cg_damping": 1.0}
    changes = {**options_of(algorithm, family, **args), **SAME_BATCH, "env__n_envs": n_envs}
    if algorithm == "nlpo":
        changes["alg__policy__args__target_update_iterations"] = 1
    # Of PPO and NLPO the t5, with its encoder, also stays in parts while it generates.
    in_parts = family == "t5" and algorithm in ("ppo", "nlpo")
    return {**changes, "generation__gather": "never" if in_parts else "always"}


def train(folder: Path, model: Path, name: str, alone: bool, **changes: Any) -> None:
    """One run."""
    algorithm = name.rpartition("_")[0]
    with a_run(folder, model, "--overwrite", **changes, tracking__experiment_name=name) as run:
        if alone:
            torch.save(dict(run.ranks.unwrap(run.model).named_parameters()), folder / f"{name}.start")
        script_of(algorithm).train(run)
