"""Trains with every algorithm and both kinds of model for two iterations and saves the weights; started by
test_every_algorithm.py in one process and through `accelerate launch` in two.

usage: every_algorithm.py FOLDER N_ENVS MODEL_OF_KIND …
"""

import sys
from pathlib import Path

import torch
from algorithm_runs import ALGORITHMS, KINDS, options_of, script_of
from helpers import flat, small_run

from train.distributed import Ranks


def main(folder: Path, n_envs: int, models: list[Path]) -> None:
    for algorithm in ALGORITHMS:
        for family, model in zip(KINDS, models, strict=True):
            # Responses of one length, so that the budget is the same episodes in one process and in two; plain SGD,
            # because adaptive steps make much of the last digit of a gradient; one optimizer step per pass.
            options = options_of(algorithm, family, n_steps=16, **({} if algorithm == "a2c" else {"batch_size": 999}))
            generation = {"min_new_tokens": 8}
            options |= {"env__n_envs": n_envs, "alg__policy__args__generation_kwargs": generation}
            options |= {"alg__policy__args__optimizer_class": "SGD", "alg__args__learning_rate": 0.5}
            options |= {"train_evaluation__save_every": 0, "tracking__experiment_name": f"{algorithm}_{family}"}
            with small_run(folder, model, **options) as run:
                before = flat(run.model)
                script_of(algorithm).train(run)
                if run.ranks.is_main:
                    torch.save([before, flat(run.model)], folder / f"{algorithm}_{family}.pt")
                run.ranks.barrier()


if __name__ == "__main__":
    Ranks.finish = lambda self: None  # type: ignore[method-assign]  # the process group serves all runs
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(arg) for arg in sys.argv[3:]])
