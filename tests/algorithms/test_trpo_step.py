"""TRPO's step on a small policy: its size, its bound, its refusal, and its equality over ranks."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_policy import DAMPING, TARGET_KL, Part, Policy, TwoRanks, dense_fisher, episodes, mean_kl_and_gain, take_step
from torch import Tensor

from algorithms.trpo import sub_sample
from algorithms.trust_region import flatten, trainable


@pytest.mark.parametrize("factor", [None, 4])
def test_the_step_is_that_of_a_dense_solver(factor: int | None) -> None:
    policy, sampling = Policy(), {}
    part = sample = episodes(policy)
    if factor is not None:
        sample = replace(part, mask=sub_sample(part.mask, factor))
        sampling = {"fisher_batches": [sample], "fisher_tokens": float(sample.mask.sum())}
    old, fisher = flatten(trainable(policy)), dense_fisher(policy, sample)
    gradients = torch.autograd.grad(
        policy.objective(part), trainable(policy), allow_unused=True, materialize_grads=True
    )
    gradient = flatten(gradients) / part.mask.sum()
    natural = torch.linalg.solve(fisher + DAMPING * torch.eye(len(old)), gradient)
    step = math.sqrt(2 * TARGET_KL / float(gradient @ natural)) * natural
    metrics = take_step(policy, [part], cg_max_steps=60, **sampling)
    scale = 0.8 ** (metrics["policy/line_search_steps"] - 1)
    torch.testing.assert_close(flatten(trainable(policy)) - old, scale * step, rtol=1e-4, atol=1e-6)
    assert metrics["policy/step_norm"] == pytest.approx(scale * float(step.norm()), rel=1e-4)
    assert metrics["policy/cg_residual"] < 1e-4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("target_kl, damping", [(0.01, 0.1), (0.05, 0.01)])
def test_a_step_improves_inside_the_trust_region_and_reports_what_it_did(
    seed: int, target_kl: float, damping: float
) -> None:
    policy = Policy(seed)
    policy.allowed[seed] = False
    part = episodes(policy, seed)
    old = flatten(trainable(policy))
    metrics = take_step(policy, [part.rows(slice(0, 2)), part.rows(slice(2, 6))], target_kl=target_kl, damping=damping)
    kl, gain = mean_kl_and_gain(policy, old, part)
    assert 0 < kl < target_kl and gain > 0
    assert metrics["policy/kl"] == pytest.approx(kl, rel=1e-6)
    assert metrics["policy/surrogate_improvement"] == pytest.approx(gain, rel=1e-6)
    assert metrics["policy/line_search_success"] == 1.0 and 1 <= metrics["policy/line_search_steps"] <= 10
    assert metrics["policy/step_norm"] == pytest.approx(float((flatten(trainable(policy)) - old).norm()), rel=1e-6)
    assert policy.unused.eq(1).all() and policy.frozen.eq(1).all()


def test_a_step_is_shortened_until_its_kl_is_below_the_target() -> None:
    """The quadratic model knows nothing of a KL that is far larger away from the old policy."""
    policy = Policy()
    part = episodes(policy)
    at_first = policy.logits(part).detach()

    def steeper(batch: Part) -> Tensor:
        logits = policy.logits(batch)
        return logits + 300 * (logits - at_first) ** 2  # same values and first derivatives at the old policy

    metrics = take_step(policy, [part], logits=steeper)
    assert metrics["policy/line_search_success"] == 1.0 and 1 < metrics["policy/line_search_steps"] <= 10
    assert 0 < metrics["policy/kl"] < TARGET_KL


def never_better(policy: Policy) -> dict[str, Any]:
    """A slope, but no height: every point has J = 0."""
    return {"objective": lambda part: policy.objective(part) - policy.objective(part).detach()}


def never_near(policy: Policy) -> dict[str, Any]:
    """KL is NaN away from the old policy."""
    old = policy.net[0].weight.detach().clone()
    return {"logits": lambda part: policy.logits(part) + (0 if policy.net[0].weight.equal(old) else torch.nan)}


@pytest.mark.parametrize("spoil", [never_better, never_near])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_refused_step_leaves_every_bit_as_it_was(
    spoil: Callable[[Policy], dict[str, Any]], dtype: torch.dtype
) -> None:
    policy = Policy()
    policy.net[0] = policy.net[0].to(dtype)
    policy.net[0].register_forward_pre_hook(lambda _, args: args[0].to(dtype))
    policy.net[0].register_forward_hook(lambda _, args, output: output.double())
    policy.unused.data = torch.tensor([-0.0, 1e-42])
    before = [p.detach().clone().view(-1).view(torch.uint8) for p in policy.parameters()]
    metrics = take_step(policy, [episodes(policy)], **spoil(policy))
    after = [p.detach().view(-1).view(torch.uint8) for p in policy.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert metrics.pop("policy/cg_residual") < 1
    assert metrics == {
        "policy/kl": 0.0,
        "policy/surrogate_improvement": 0.0,
        "policy/line_search_success": 0.0,
        "policy/line_search_steps": 10.0,
        "policy/step_norm": 0.0,
    }


def test_the_line_search_has_the_length_and_the_pace_that_were_asked_for() -> None:
    refused, full, halved = Policy(), Policy(), Policy()
    part, old = episodes(full), flatten(trainable(full))
    assert take_step(refused, [part], max_tries=3, **never_better(refused))["policy/line_search_steps"] == 3.0
    norm = take_step(full, [part])["policy/step_norm"]

    def nan_at_first(policy: Policy) -> Callable[[Part], Tensor]:
        too_far = 0.9 * norm
        return lambda batch: (
            policy.logits(batch) + (torch.nan if (flatten(trainable(policy)) - old).norm() > too_far else 0.0)
        )

    metrics = take_step(halved, [part], shrink=0.5, logits=nan_at_first(halved))
    assert metrics["policy/line_search_steps"] == 2.0
    torch.testing.assert_close(flatten(trainable(halved)) - old, (flatten(trainable(full)) - old) / 2)


def test_without_a_gradient_nothing_moves_and_no_metric_is_nan() -> None:
    policy = Policy()
    part, old = episodes(policy), flatten(trainable(policy))
    metrics = take_step(policy, [replace(part, advantages=torch.zeros_like(part.advantages))])
    assert torch.equal(flatten(trainable(policy)), old)
    assert set(metrics.values()) == {0.0}


def test_a_gradient_that_is_not_finite_stops_before_anything_changes() -> None:
    policy = Policy()
    part, old = episodes(policy), flatten(trainable(policy))
    part.advantages[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="not finite"):
        take_step(policy, [part])
    assert torch.equal(flatten(trainable(policy)), old)


def test_tokens_outside_the_mask_do_not_matter() -> None:
    clean, dirty = Policy(), Policy()
    part = episodes(clean)
    dirt = {
        name: torch.where(part.mask, x, torch.nan)
        for name, x in vars(part).items()
        if name in ("advantages", "old_logprobs")
    }
    states = part.states.masked_fill(~part.mask[..., None], torch.nan)
    assert take_step(clean, [part]) == take_step(dirty, [replace(part, **dirt, states=states)])
    assert torch.equal(flatten(trainable(clean)), flatten(trainable(dirty)))


@pytest.mark.parametrize("factor", [1, 3])
def test_two_ranks_take_the_same_step_as_one(factor: int) -> None:
    alone, pair = Policy(), [Policy(), Policy()]
    part = episodes(alone)
    fisher = replace(part, mask=sub_sample(part.mask, factor))
    tokens, fisher_tokens = float(part.mask.sum()), float(fisher.mask.sum())

    def work(rank: int, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        own = [slice(0, 2), slice(2, 6)][rank]
        sample = {"fisher_batches": [fisher.rows(own)], "fisher_tokens": fisher_tokens}
        return take_step(pair[rank], [part.rows(own)], n_tokens=tokens, reduce=reduce, **sample)

    expected = take_step(alone, [part], fisher_batches=[fisher], fisher_tokens=fisher_tokens)
    metrics = TwoRanks().run(work)
    first, second, single = (flatten(trainable(policy)) for policy in (*pair, alone))
    assert torch.equal(first, second) and metrics[0] == metrics[1]
    torch.testing.assert_close(first, single, rtol=1e-9, atol=1e-12)
    assert metrics[0] == pytest.approx(expected, rel=1e-6)


def test_one_rank_that_sees_no_improvement_is_outvoted_by_the_sum() -> None:
    """Each rank alone would decide differently: only the reduced numbers count."""
    pair = [Policy(), Policy()]
    part = episodes(pair[0])
    weight = torch.tensor([-0.3, -0.3, -0.3, 3.0, 3.0, 3.0])[:, None]  # the two disagree about the first action
    part.advantages = torch.where(part.actions == 0, weight, 0.0).double()
    old, tokens = flatten(trainable(pair[0])), float(part.mask.sum())
    shares = [part.rows(slice(0, 3)), part.rows(slice(3, 6))]
    metrics = TwoRanks().run(lambda rank, reduce: take_step(pair[rank], [shares[rank]], n_tokens=tokens, reduce=reduce))
    gains = [mean_kl_and_gain(pair[0], old, share)[1] for share in shares]
    assert min(gains) < 0 < max(gains)
    assert metrics[0] == metrics[1] and metrics[0]["policy/line_search_success"] == 1.0
    assert torch.equal(*(flatten(trainable(policy)) for policy in pair))


def test_the_fisher_matrix_of_a_sub_sample_steers_but_the_bound_is_on_all_tokens() -> None:
    full, sampled = Policy(), Policy()
    part, old = episodes(full), flatten(trainable(full))
    fisher = replace(part, mask=sub_sample(part.mask, 4))
    take_step(full, [part])
    metrics = take_step(sampled, [part], fisher_batches=[fisher], fisher_tokens=float(fisher.mask.sum()))
    assert (flatten(trainable(sampled)) - flatten(trainable(full))).norm() > 1e-3
    kl, gain = mean_kl_and_gain(sampled, old, part)
    assert 0 < kl < TARGET_KL and gain > 0
    assert metrics["policy/kl"] == pytest.approx(kl, rel=1e-6)
