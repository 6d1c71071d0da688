"""TRPO's step in a run: inside the trust region, or none at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import options_of
from helpers import distance, flat, small_run

from train import trpo
from train.collect import collect
from train.setup import Run
from train.trpo import fit_critic, update

Models = Callable[..., Path]


def exact_kl(run: Run, rollout: Any, old: torch.Tensor) -> float:
    """Mean KL per token from the policy with the weights `old` to the present one, over the whole vocabulary."""
    policy = run.ranks.unwrap(run.model).policy
    inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids, rollout.response_mask)
    with torch.no_grad():
        new_logits = policy.token_logits(*inputs).double().log_softmax(1)
        present = flat(policy)
        torch.nn.utils.vector_to_parameters(old, policy.parameters())
        old_logits = policy.token_logits(*inputs).double().log_softmax(1)
        torch.nn.utils.vector_to_parameters(present, policy.parameters())
    return float((old_logits.exp() * (old_logits - new_logits)).sum(1).mean())


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
@pytest.mark.parametrize("sub_sampling_factor", [1, 3])
def test_a_step_stays_inside_the_trust_region(
    family: str, sub_sampling_factor: int, models: Models, tmp_path: Path
) -> None:
    options = options_of("trpo", family, sub_sampling_factor=sub_sampling_factor, target_kl=0.02)
    with small_run(tmp_path, models(family), **options) as run:
        policy, rollout = run.ranks.unwrap(run.model).policy, collect(run, 1)
        old = flat(policy)
        stats = update(run, rollout, 1)
        assert stats["policy/line_search_success"] == 1 and stats["policy/surrogate_improvement"] > 0
        kl = exact_kl(run, rollout, old)
        assert 0.002 < kl < 0.02
        assert stats["policy/approx_kl"] == stats["policy/kl"] == pytest.approx(kl, rel=1e-3)
        assert float((flat(policy) - old).norm()) == pytest.approx(stats["policy/step_norm"], rel=1e-4)


def test_a_step_that_fails_leaves_every_bit_and_says_so(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surrogate = trpo.surrogate

    def falling(*args: Any) -> Any:
        """What the line search sees gets worse with every evaluation."""
        total, stats = surrogate(*args)
        if not torch.is_grad_enabled():
            falling.calls += 1  # type: ignore[attr-defined]
            total = total - 100.0 * falling.calls  # type: ignore[attr-defined]
        return total, stats

    falling.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(trpo, "surrogate", falling)
    with small_run(tmp_path, models(), **options_of("trpo", "gpt2", line_search_max_iter=4)) as run:
        policy, rollout = run.ranks.unwrap(run.model).policy, collect(run, 1)
        old = flat(policy)
        stats = update(run, rollout, 1)
        assert torch.equal(flat(policy), old)
        assert stats["policy/line_search_success"] == 0 and stats["policy/line_search_steps"] == 4
        assert stats["policy/kl"] == 0 and stats["policy/step_norm"] == 0


@pytest.mark.parametrize("value_model", ["separate", "shared"])
def test_the_critic_learns_without_the_policy(value_model: str, models: Models, tmp_path: Path) -> None:
    options = options_of("trpo", "gpt2", n_critic_updates=20, learning_rate=0.01)
    with small_run(tmp_path, models(), **options, alg__policy__args__value_model=value_model) as run:
        model, rollout = run.ranks.unwrap(run.model), collect(run, 1)
        old = flat(model.policy)

        def error() -> float:
            inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids)
            with torch.no_grad():
                return float((model.values(*inputs)[:, :-1] - rollout.returns)[rollout.response_mask].square().mean())

        before = error()
        stats = fit_critic(run, rollout, 1)
        assert torch.equal(flat(model.policy), old)
        assert error() < 0.8 * before
        assert stats["value/optimizer_steps"] == 20 * 2


def test_values_alone_are_those_of_the_whole_forward(models: Models, tmp_path: Path) -> None:
    for value_model in ("separate", "shared"):
        options = {"alg__policy__args__value_model": value_model}
        with small_run(tmp_path, models(), value_head=0.5, **options_of("trpo", "gpt2"), **options) as run:
            rollout, model = collect(run, 1), run.ranks.unwrap(run.model)
            inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids)
            whole = model(*inputs, rollout.response_mask).values
            torch.testing.assert_close(model.values(*inputs), whole)
            assert model.values(*inputs).grad_fn is not None and whole.abs().max() > 0.1


def test_the_step_depends_neither_on_micro_batches_nor_on_their_sub_samples(models: Models, tmp_path: Path) -> None:
    found = []
    for size in (1, 3, 99):
        options = options_of("trpo", "gpt2", sub_sampling_factor=5, micro_batch_size=size, n_critic_updates=0)
        with small_run(tmp_path, models(), **options) as run:
            old, rollout = flat(run.model), collect(run, 1)
            update(run, rollout, 1)
            found.append(flat(run.model) - old)
    assert distance(found[1], found[0]) < 1e-3 and distance(found[2], found[0]) < 1e-3


def test_what_does_not_count_moves_neither_policy_nor_critic(models: Models, tmp_path: Path) -> None:
    with small_run(tmp_path, models(), **options_of("trpo", "gpt2")) as run:
        update(run, collect(run, 1), 1)  # so that Adam has momentum
        rollout, before = collect(run, 2), flat(run.model)
        rollout.loss_mask = torch.zeros_like(rollout.loss_mask)
        stats = update(run, rollout, 2)
        assert torch.equal(flat(run.model), before) and stats["value/optimizer_steps"] == 0
