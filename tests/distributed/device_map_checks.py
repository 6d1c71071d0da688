"""Two ranks, each with its models spread over two devices of its own (both its CPU): the same as plain DDP.

usage, through `accelerate launch`: device_map_checks.py FOLDER GPT2 T5
"""

import sys
from pathlib import Path
from typing import Any

import torch
from algorithm_runs import options_of, script_of
from helpers import flat, flat_gradient, make_rollout, small_run
from torch.nn.parallel import DistributedDataParallel

from train import setup
from train.distributed import Ranks
from train.placement import is_spread

MAP = {
    "alg__policy__args__device_map": "sequential",
    "alg__policy__args__max_memory": {"0": "100MiB", "1": "100MiB"},
    "distributed__gpus_per_process": 2,
}
FEW = {
    f"train_evaluation__{name}": value for name, value in {"n_iters": 1, "eval_every": 0, "max_eval_samples": 2}.items()
}


def check_gradients(run: Any) -> None:
    """They are this rank's own after the first of two backward passes, and the mean of all ranks after the second."""
    assert isinstance(run.model, DistributedDataParallel) and is_spread(run.model) and run.model.device_ids is None
    part = make_rollout([3, 5, 2, 4], seed=run.ranks.rank)
    for last in (False, True):
        with run.ranks.accumulating(run.model, last):
            scores = run.model(part.prompt_ids, part.prompt_mask, part.response_ids, part.response_mask)
            run.ranks.backward(run.model, scores.logprobs.sum() + scores.values.sum(), 14.0, last)
        assert torch.equal(*run.ranks.gather([flat_gradient(run.model)])) == last
    run.optimizer.zero_grad()


def trained(folder: Path, algorithm: str, model: Path, family: str, changes: dict[str, Any]) -> torch.Tensor:
    """The weights after an iteration, the same on both ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    setup.own_gpus = lambda *_, **__: [torch.device("cpu")] * 2 if changes else []
    with small_run(folder, model, **options_of(algorithm, family), **FEW, **changes) as run:
        assert is_spread(run.model) == bool(changes)
        if changes and algorithm == "ppo":
            check_gradients(run)
        script_of(algorithm).train(run)
        weights = flat(run.ranks.unwrap(run.model))
        assert torch.equal(*run.ranks.gather([weights]))
        run.ranks.barrier()
    return weights


def main() -> None:
    folder, models = Path(sys.argv[1]), dict(zip(("gpt2", "t5"), map(Path, sys.argv[2:]), strict=True))
    for algorithm, family in (("ppo", "t5"), ("trpo", "gpt2")):
        places = (("plain", {}), ("spread", MAP))
        both = [trained(folder / name / algorithm, algorithm, models[family], family, args) for name, args in places]
        assert torch.equal(*both), algorithm
        print(algorithm, "spread is plain", flush=True)


if __name__ == "__main__":
    Ranks.finish = lambda self: None  # type: ignore[method-assign]  # the process group serves all runs
    main()
