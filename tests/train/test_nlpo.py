"""NLPO's mask policy: when it follows the policy, what it does to sampling and gradient, and when it does nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import options_of
from helpers import distance, flat, gradients, lines, small_run
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from algorithms.packing import unpack_mask
from algorithms.sampling import SamplingSpec, sample_responses
from train import nlpo, ppo
from train.collect import collect
from train.evaluation import evaluate
from train.nlpo import follow, mask_stats
from train.ppo import update

Models = Callable[..., Path]


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_mask_follows_the_policy_every_so_many_iterations(family: str, models: Models, tmp_path: Path) -> None:
    options = options_of("nlpo", family, learning_rate=0.02) | {"alg__policy__args__top_mask": 0.5}
    options["reward_fn"] = {"id": "user_code:each_token"}
    with small_run(tmp_path, models(family), **options) as run:
        policy, mask_model = run.ranks.unwrap(run.model).policy, run.mask_model
        assert mask_model is not None
        start, masks = flat(policy), []
        assert torch.equal(flat(mask_model), start)
        for iteration in (1, 2, 3):
            rollout = collect(run, 1)  # the same prompts and random numbers each time
            masks.append(rollout.action_mask[:4, 0].clone())  # of the first wave
            stats = mask_stats(run, rollout)
            assert 1 <= stats["nlpo/mask_size"] < 32 and 0 < stats["nlpo/mask_mass"] < 1
            # In its own mask the policy has at least half of its probability, and its likeliest token.
            assert iteration == 2 or (stats["nlpo/hit_rate"] == 1 and stats["nlpo/mask_mass"] >= 0.5)
            update(run, rollout, iteration)
            follow(run, iteration)
            moved = not torch.equal(flat(mask_model), start)
            assert moved == (iteration >= 2)
            assert torch.equal(flat(mask_model), flat(policy)) == (iteration == 2)
        assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_with_a_mask_that_lags_behind_the_gradient_is_not_ppo_s(models: Models, tmp_path: Path) -> None:
    options = options_of("nlpo", "gpt2", n_epochs=1, batch_size=48)
    with small_run(tmp_path, models(), **options | {"alg__policy__args__top_mask": 0.7}) as run:
        update(run, collect(run, 1), 1)  # no follow: the mask is the policy's of before
        rollout = collect(run, 2)
        inside = unpack_mask(rollout.action_mask, 32)[rollout.response_mask]
        assert not inside.all() and inside.gather(1, rollout.response_ids[rollout.response_mask][:, None]).all()
        (ours,) = gradients(run, rollout)
        stored, rollout.action_mask = rollout.action_mask, None
        inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids, rollout.response_mask)
        masked = rollout.old_logprobs
        with torch.no_grad():
            rollout.old_logprobs = run.model(*inputs).logprobs
        # Renormalised: what is sampled inside the mask is likelier than without it.
        assert (masked - rollout.old_logprobs)[rollout.response_mask].min() > 0
        (theirs,) = gradients(run, rollout)
        assert distance(ours, theirs) > 0.01
        rollout.action_mask = torch.full_like(stored, 255)  # a mask of everything is no mask
        (same,) = gradients(run, rollout)
        assert distance(same, theirs) < 1e-6


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_mask_of_everything_is_ppo_bit_for_bit(family: str, models: Models, tmp_path: Path) -> None:
    found = []
    for script, name in ((nlpo, "nlpo"), (ppo, "ppo")):
        folder = tmp_path / name
        folder.mkdir()
        options = options_of(name, family) | ({"alg__policy__args__top_mask": 1.0} if name == "nlpo" else {})
        with small_run(folder, models(family), **options) as run:
            script.train(run)
        rows = [
            {k: v for k, v in row.items() if not k.startswith(("perf/", "nlpo/"))}
            for row in lines(run.folder / "metrics.jsonl")
        ]
        found.append((load_file(run.folder / "model/model.safetensors"), rows))
    (ours, our_rows), (theirs, their_rows) = found
    assert our_rows == their_rows and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_evaluation_samples_as_rollouts_do_inside_the_mask(models: Models, tmp_path: Path) -> None:
    options = options_of("nlpo", "gpt2") | {"alg__policy__args__mask_type": "learned_top_k"}
    with small_run(tmp_path, models(), **options | {"alg__policy__args__top_mask": 1}) as run:
        evaluate(run, "val", 0)
        likeliest = sample_responses(
            run.ranks.unwrap(run.model).policy,
            *(torch.from_numpy(x) for x in run.sampler.envs.prompts("val", range(12))[0].values()),
            torch.zeros(12, 1),
            SamplingSpec(max_new_tokens=1, do_sample=False),
            eos_token_ids=[1],
            pad_token_id=0,
        ).ids
    # A mask holds one token and EOS: with any random number it is the likeliest one, unless the response is empty.
    rows = json.loads((run.folder / "epoch_0_val_split_predictions.json").read_text())
    first = [row["generated_text"].split()[:1] for row in rows]
    assert sum(map(bool, first)) > 8
    for words, token in zip(first, likeliest[:, 0].tolist(), strict=True):
        assert not words or words == [str(token - 3)]


class Largest(TorchDispatchMode):
    """The largest tensor of floating point numbers that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())  # views are free
        return result


def test_a_vocabulary_of_fifty_thousand_needs_no_array_of_batch_by_length_by_vocabulary(
    tmp_path: Path, models: Models
) -> None:
    from tools.make_tiny_model import build_model, numbers_tokenizer, save, wrap

    tokenizer = wrap(numbers_tokenizer(50_000), 32)
    model = build_model("gpt2", tokenizer, layers=1, hidden=8, heads=1, positions=32, seed=0)
    save(tmp_path / "model", model, tokenizer)
    options = options_of("nlpo", "gpt2", n_epochs=1, micro_batch_size=16) | {"env__n_envs": 16}
    options["alg__policy__args__logits_chunk_mb"] = 2
    with small_run(tmp_path, tmp_path / "model", **options) as run:
        vocab = run.ranks.unwrap(run.model).policy.vocab_size
        with Largest() as largest:
            rollout = collect(run, 1)
            update(run, rollout, 1)
        batch, length = rollout.response_ids.shape
        assert rollout.action_mask.dtype == torch.uint8 and rollout.action_mask.numel() <= batch * length * vocab / 7
        assert largest.elements <= 16 * vocab  # one step of sampling, or less
        assert batch * length > 10 * 16


def test_min_tokens_that_make_the_mask_inert_are_said(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of("nlpo", "gpt2") | {"alg__policy__args__generation_kwargs": {"top_k": 5}}
    with small_run(tmp_path, models(), **options, alg__policy__args__min_tokens_to_keep=5):
        pass
    assert "min_tokens_to_keep (5) is not below top_k (5)" in capsys.readouterr().out
    with small_run(tmp_path, models(), **options, alg__policy__args__min_tokens_to_keep=4):
        pass
    assert "min_tokens_to_keep" not in capsys.readouterr().out
