"""What holds for every algorithm, with causal and with sequence-to-sequence models."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import ALGORITHMS, KINDS, collect, options_of, script_of
from helpers import flat, lines, small_run
from safetensors.torch import load_file

Models = Callable[..., Path]
GENERATION = {"top_p": 0.95, "temperature": 0.8, "min_new_tokens": 3}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("family", "lora"), [("gpt2", False), ("t5", False), ("bart", False), ("gpt2", True)])
def test_an_iteration_of_every_algorithm(
    algorithm: str, family: str, lora: bool, models: Models, tmp_path: Path
) -> None:
    """The update's own forward gives the sampled tokens the log-probabilities they were sampled with. The KL to the
    reference is 0 as long as nothing is trained, and then is not."""
    script, options = script_of(algorithm), options_of(algorithm, family, n_steps=24)
    options["alg__policy__args__lora"] = {"r": 4} if lora else None
    with small_run(tmp_path, models(family), **options, alg__policy__args__generation_kwargs=GENERATION) as run:
        for iteration in (1, 2):
            rollout = collect(script, run, iteration)
            assert int(rollout.response_mask.sum()) == 96 and torch.equal(rollout.loss_mask, rollout.response_mask)
            lengths = rollout.prompt_mask.sum(1)
            assert lengths.min() < lengths.max() and rollout.action_mask is not None
            inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids, rollout.response_mask)
            now = run.model(*inputs, temperature=0.8, action_mask=rollout.action_mask)
            difference = (now.logprobs - rollout.old_logprobs)[rollout.response_mask].abs().max()
            assert float(difference.detach()) < 1e-5
            assert bool(rollout.kl.abs().max() > 1e-5) == (iteration == 2)
            before = flat(run.model)
            stats = script.update(run, rollout, iteration)
            assert not torch.equal(flat(run.model), before)
            assert all(math.isfinite(value) for value in stats.values())
            assert 0 < stats["policy/entropy"] < 4


def train_in_parts(algorithm: str, family: str, stops: list[int], model: Path, folder: Path) -> dict[str, Any]:
    """The files of the last checkpoint of a run that is stopped after each of the iterations `stops` and resumed."""
    script, options = script_of(algorithm), options_of(algorithm, family)
    for i, n_iters in enumerate(stops):
        options |= {"train_evaluation__n_iters": n_iters, "train_evaluation__eval_every": 0}
        with small_run(folder, model, **options, resume=i > 0) as run:
            assert run.state.iteration == (stops[i - 1] if i else 0)
            script.train(run)
    last = folder / f"tests/run/checkpoints/checkpoint_{stops[-1]}"
    tensors = {path.name: load_file(path) for path in last.glob("*.safetensors")}
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in lines(run.folder / "metrics.jsonl")]
    return {**tensors, "rows": rows}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("family", KINDS)
def test_interrupted_and_resumed_is_the_same_bit_for_bit(
    algorithm: str, family: str, models: Models, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir(), (tmp_path / "parts").mkdir()
    whole = train_in_parts(algorithm, family, [3], models(family), tmp_path / "whole")
    parts = train_in_parts(algorithm, family, [1, 2, 3], models(family), tmp_path / "parts")
    assert whole.pop("rows") == parts.pop("rows")
    assert whole.keys() == parts.keys() and len(whole) == (2 if algorithm == "nlpo" else 1)
    for name, tensors in whole.items():
        assert tensors.keys() == parts[name].keys()
        assert all(torch.equal(tensors[key], parts[name][key]) for key in tensors), name
