"""The update: its gradient, the first ratio, early stop, clipping, learning rates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import changed, distance, flat, flat_gradient, gradients, small_run

from train.batches import Rollout
from train.collect import collect
from train.ppo import update
from train.setup import Run
from train.update import explained_variance, lr_factor, set_learning_rates

GENERATION = {"top_k": 29, "top_p": 0.95, "temperature": 0.8, "min_new_tokens": 3}


def used_rollout(run: Run) -> Rollout:
    """A rollout of which the policy has moved away: ratios differ from 1 and some are clipped."""
    rollout = collect(run, 1)
    noise = torch.randn(rollout.old_logprobs.shape, generator=torch.Generator().manual_seed(0))
    rollout.old_logprobs = rollout.old_logprobs + 0.2 * noise
    rollout.old_values = rollout.old_values + 0.1 * noise
    return rollout


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {"alg__policy__args__generation_kwargs": GENERATION}),
        ("llama", {"alg__policy__args__value_model": "shared", "alg__args__advantage_scope": "batch"}),
    ],
)
def test_the_gradient_depends_neither_on_micro_batches_nor_on_padding(
    family: str, options: dict[str, Any], models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"alg__args__ent_coef": 0.1, "alg__args__clip_range_vf": 0.05, "alg__args__n_epochs": 1}
    with small_run(tmp_path, models(family), value_head=0.3, **options, **extra) as run:
        rollout = used_rollout(run)
        whole = gradients(run, rollout, alg__args__micro_batch_size=100)
        assert len(whole) == 2 and all(float(g.norm()) > 0.1 for g in whole)
        for size in (1, 2, 3, 5):
            for one, other in zip(gradients(run, rollout, alg__args__micro_batch_size=size), whole, strict=True):
                assert distance(one, other) < 1e-5
        monkeypatch.setattr(Rollout, "rows", padded_rows)
        for one, other in zip(gradients(run, rollout, alg__args__micro_batch_size=3), whole, strict=True):
            assert distance(one, other) < 1e-5


def padded_rows(self: Rollout, index: torch.Tensor) -> Rollout:
    """Rollout.rows with more padding instead of less."""
    part = {name: None if x is None else x[index] for name, x in vars(self).items()}
    for name, x in part.items():
        if name.startswith("prompt_"):
            part[name] = torch.nn.functional.pad(x, (3, 0))
        elif x is not None and x.ndim > 1:
            part[name] = torch.nn.functional.pad(x, (0,) * (2 * x.ndim - 4) + (0, 5))
    return Rollout(**part)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_the_ratio_is_1_at_the_first_minibatch(family: str, models: Any, tmp_path: Path) -> None:
    options = {"alg__policy__args__generation_kwargs": GENERATION, "alg__args__n_epochs": 1}
    with small_run(tmp_path, models(family), alg__args__n_steps=40, alg__args__batch_size=160, **options) as run:
        for iteration in (1, 2):  # the second time the policy is no longer the reference
            rollout = collect(run, iteration)
            lengths = rollout.prompt_mask.sum(1)
            assert lengths.min() < lengths.max()  # so there is padding on the left
            stats = update(run, rollout, iteration)
            assert stats["policy/optimizer_steps"] == 1
            assert stats["policy/ratio"] == pytest.approx(1, abs=1e-6)
            assert stats["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
            assert abs(stats["policy/approx_kl"]) <= 1e-6 and stats["policy/clip_fraction"] == 0
            assert (rollout.kl.abs().max() > 1e-4) == (iteration == 2)
            tokens = rollout.response_ids[rollout.response_mask]
            assert (tokens == 1).any() and not (rollout.response_ids[:, :3] == 1).any()  # EOS, but not before token 3


def test_an_early_stop_comes_before_the_step(models: Any, tmp_path: Path) -> None:
    with small_run(tmp_path, models(), alg__args__target_kl=1e-6, alg__args__micro_batch_size=1) as run:
        rollout, before = collect(run, 1), flat(run.model)
        stats = update(run, rollout, 1)  # the first step goes anywhere, the second would start from too far away
        assert stats["policy/optimizer_steps"] == 1 and not torch.equal(flat(run.model), before)
        after = flat(run.model)
        stats = update(run, rollout, 1)
        assert stats["policy/optimizer_steps"] == 0 and stats["policy/grad_norm"] == 0
        assert torch.equal(flat(run.model), after)
        assert all(p.grad is None or not p.grad.any() for p in run.model.parameters())
        assert stats["policy/approx_kl"] > 1.5e-6
        far = replace(run, config=changed(run.config, alg__args__target_kl=1e3))
        assert update(far, rollout, 1)["policy/optimizer_steps"] == 4


def test_policy_and_critic_are_clipped_together(models: Any, tmp_path: Path) -> None:
    options = {"optimizer_class": "SGD", "weight_decay": 0.0}
    changes = {f"alg__policy__args__{name}": value for name, value in options.items()}
    with small_run(tmp_path, models(), value_head=0.3, **changes, alg__args__learning_rate=1.0) as run:
        rollout = collect(run, 1)
        whole = changed(run.config, alg__args__batch_size=48, alg__args__n_epochs=1)
        (expected,) = gradients(replace(run, config=whole), rollout)
        norm = float(expected.norm())
        for limit in (norm / 10, norm * 10):
            before = flat(run.model)
            stats = update(replace(run, config=changed(whole, alg__args__max_grad_norm=limit)), rollout, 1)
            step = before - flat(run.model)
            assert stats["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert float(step.norm()) == pytest.approx(min(norm, limit), rel=1e-3)
            assert distance(step, expected * min(1.0, limit / norm)) < 1e-3
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(before, run.model.parameters())


def test_a_gradient_that_is_not_finite_stops_the_run_without_a_step(models: Any, tmp_path: Path) -> None:
    with small_run(tmp_path, models()) as run:
        rollout, before = collect(run, 1), flat(run.model)
        rollout.returns[2, 0] = float("nan")
        with pytest.raises(FloatingPointError, match="gradient's norm is nan"):
            update(run, rollout, 1)
        # Steps before the minibatch with the fault are taken, none after: here it may be the first or the second.
        steps = {float(state["step"]) for state in run.optimizer.state_dict()["state"].values()}
        assert len(steps) <= 1 and torch.isfinite(flat(run.model)).all()
        assert steps or torch.equal(flat(run.model), before)
        with torch.no_grad():
            run.ranks.unwrap(run.model).value_head.weight.fill_(float("inf"))
        with pytest.raises(FloatingPointError, match=r"not finite in the episodes of training samples \[\d+"):
            collect(run, 2)


def test_learning_rate_schedules() -> None:
    def course(schedule: str, warmup: int, n_iters: int = 4) -> list[float]:
        return [round(lr_factor(i, n_iters, schedule, warmup), 6) for i in range(1, n_iters + 1)]

    assert course("constant", 0) == [1, 1, 1, 1]
    assert course("linear", 0) == [1, 0.75, 0.5, 0.25]
    assert course("cosine", 0) == [1, 0.853553, 0.5, 0.146447]
    assert course("constant", 2) == [0.5, 1, 1, 1]
    assert course("linear", 2, 6) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert course("linear", 4) == [0.25, 0.5, 0.75, 1]
    assert course("linear", 9) == [round(i / 9, 6) for i in (1, 2, 3, 4)]


def test_both_learning_rates_follow_the_schedule(models: Any, tmp_path: Path) -> None:
    rates = {"alg__args__learning_rate": 0.01, "alg__args__critic_learning_rate": 0.04}
    with small_run(tmp_path, models(), **rates) as run:
        for factor in (0.5, 0.25):
            set_learning_rates(run.optimizer, factor)
            found = {group["name"].split("_")[0]: group["lr"] for group in run.optimizer.param_groups}
            assert found == {"policy": 0.01 * factor, "critic": 0.04 * factor}


def test_explained_variance(models: Callable[..., Path], tmp_path: Path) -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    returns = torch.tensor([[1.0, 2, 99], [3, 4, 5]])
    values = torch.tensor([[1.0, 2, -99], [3, 4, 0]])
    with small_run(tmp_path, models()) as run:
        # Var of (0, 0, 0, 0, 5) is 4, of (1, 2, 3, 4, 5) it is 2.
        assert explained_variance(values, returns, mask, run.ranks) == pytest.approx(-1)
        assert explained_variance(returns, returns, mask, run.ranks) == pytest.approx(1)
        assert explained_variance(returns + 3, returns, mask, run.ranks) == pytest.approx(1)
        assert explained_variance(values, torch.full_like(values, 2.0), mask, run.ranks) == 0


@pytest.mark.parametrize("value_model", ["separate", "shared"])
def test_the_critic_warms_up_alone(value_model: str, models: Any, tmp_path: Path) -> None:
    options = {"alg__args__critic_warmup_iterations": 1, "alg__args__ent_coef": 0.1}
    with small_run(tmp_path, models(), **options, alg__policy__args__value_model=value_model) as run:
        model = run.ranks.unwrap(run.model)
        before, head = flat(model.policy), flat(model.value_head)
        stats = update(run, collect(run, 1), 1)
        assert torch.equal(flat(model.policy), before) and not torch.equal(flat(model.value_head), head)
        assert stats["policy/learning_rate"] == 0 and stats["policy/grad_norm"] > 0
        stats = update(run, collect(run, 2), 2)
        assert not torch.equal(flat(model.policy), before) and stats["policy/learning_rate"] == 0.003
        # Its first steps are first steps: without the warm-up, Adam's would count as these do.
        steps = {
            group["name"].split("_")[0]: {float(run.optimizer.state[p]["step"]) for p in group["params"]}
            for group in run.optimizer.param_groups
        }
        assert steps == {"policy": {4.0}, "critic": {8.0}}


@pytest.mark.parametrize("action_mask", [False, True])
def test_the_kl_in_the_loss_pulls_to_the_reference(action_mask: bool, models: Any, tmp_path: Path) -> None:
    """In the reward there is then no KL. Its gradient: that of the estimate, of the unrestricted distributions."""
    generation = {"top_k": 5} if action_mask else {}
    options = {"alg__kl_div": {"coeff": 2.0, "in_loss": True, "estimator": "k2"}, "alg__args__n_epochs": 1}
    options |= {"alg__args__batch_size": 48, "alg__policy__args__generation_kwargs": generation}
    with small_run(tmp_path, models(), **options) as run:
        update(run, collect(run, 1), 1)
        rollout = collect(run, 2)
        assert rollout.kl.abs().max() > 1e-3
        assert torch.equal(rollout.rewards, rollout.task_rewards)
        (with_kl,) = gradients(run, rollout)
        (without,) = gradients(run, rollout, alg__kl_div__in_loss=False)
        inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids, rollout.response_mask)
        model = run.ranks.unwrap(run.model)
        model.zero_grad()
        raw = model.policy(*inputs).logprobs  # without the action mask
        (0.5 * 2.0 * (raw - rollout.ref_logprobs)[rollout.response_mask].square().mean()).backward()
        expected = flat_gradient(run.model)
        assert float(expected.norm()) > 1e-3
        assert distance(with_kl - without, expected) < 1e-4


@pytest.mark.parametrize("in_loss", [False, True])
def test_a_forced_token_has_no_kl(in_loss: bool, models: Any, tmp_path: Path) -> None:
    """It is not sampled from the policy: its log ratio estimates nothing, and may be large."""
    generation = {"forced_bos_token_id": 9, "forced_eos_token_id": 1, "min_new_tokens": 8}
    options = {"alg__kl_div": {"coeff": 0.3, "in_loss": in_loss}, "alg__policy__args__generation_kwargs": generation}
    with small_run(tmp_path, models(), **options, alg__args__batch_size=48, alg__args__n_epochs=1) as run:
        update(run, collect(run, 1), 1)
        rollout = collect(run, 2)
        assert (rollout.response_ids[:, 0] == 9).all() and (rollout.response_ids[:, 7] == 1).all()
        assert not rollout.old_logprobs[:, [0, 7]].any() and not rollout.kl[:, [0, 7]].any()
        assert rollout.kl[:, 1:7].abs().min() > 0
        (expected,) = gradients(run, rollout)
        rollout.ref_logprobs[:, [0, 7]] = -50.0
        (found,) = gradients(run, rollout)
        assert distance(found, expected) < 1e-6
