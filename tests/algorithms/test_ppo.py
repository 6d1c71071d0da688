"""The PPO loss on hand-made tensors: clipping, signs, sums, and what stands outside the mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.ppo import max_ratio, policy_loss, ppo_loss, value_loss

HYPER = {"clip_range": 0.2, "clip_range_vf": 0.3, "vf_coef": 0.5, "ent_coef": 0.1}
LEARNT = ("logprobs", "entropy", "values")


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("logprobs", "old_logprobs", "entropy", "values", "old_values", "advantages", "returns")
    made = {name: torch.randn(4, 5, generator=generator) for name in names}
    return {**made, "response_mask": torch.arange(5) < torch.tensor([5, 2, 0, 3])[:, None]}


def loss_and_gradients(inputs: dict[str, Tensor], **hyper: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEARNT}
    loss, stats = ppo_loss(**{**inputs, **leaves}, **{**HYPER, **hyper})
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}, stats


@pytest.mark.parametrize("clip_range_vf", [None, 0.3])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_garbage_outside_the_mask_changes_nothing(garbage: float, clip_range_vf: float | None) -> None:
    inputs = tensors()
    mask = inputs["response_mask"]
    dirty = {k: x if x is mask else torch.where(mask, x, garbage) for k, x in inputs.items()}
    expected = loss_and_gradients(inputs, clip_range_vf=clip_range_vf)
    torch.testing.assert_close(loss_and_gradients(dirty, clip_range_vf=clip_range_vf), expected, rtol=0, atol=0)
    assert all(gradient[mask].any() and not gradient[~mask].any() for gradient in expected[1].values())
    old = (dirty["logprobs"], dirty["old_logprobs"], mask)
    assert max_ratio(*old) == max_ratio(inputs["logprobs"], inputs["old_logprobs"], mask)


def test_losses_and_statistics_are_sums_that_add_up_over_micro_batches() -> None:
    inputs = tensors()
    loss, gradients, stats = loss_and_gradients(inputs)
    parts = [loss_and_gradients({k: x[rows] for k, x in inputs.items()}) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=1e-6, atol=1e-6)
    for name in LEARNT:
        assert torch.equal(torch.cat([part[1][name] for part in parts]), gradients[name])
    for key, (total, count) in stats.items():
        assert sum(part[2][key][1] for part in parts) == count == 10
        torch.testing.assert_close(sum(part[2][key][0] for part in parts), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "advantage, ratio, expected_loss, moves",
    [
        (2.0, 1.1, -2.2, True),
        (2.0, 1.5, -2.4, False),  # clipped: already more likely than allowed
        (2.0, 0.5, -1.0, True),  # the pessimistic bound keeps the gradient that undoes the damage
        (-2.0, 0.5, 1.6, False),
        (-2.0, 1.5, 3.0, True),
    ],
)
def test_the_surrogate_is_clipped_on_the_optimistic_side_only(
    advantage: float, ratio: float, expected_loss: float, moves: bool
) -> None:
    logprobs = torch.tensor([[ratio]]).log().requires_grad_()
    one = torch.ones(1, 1, dtype=torch.bool)
    loss, stats = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 1),
        advantages=torch.tensor([[advantage]]),
        response_mask=one,
        clip_range=0.2,
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected_loss, rel=1e-6)
    assert float(logprobs.grad) == pytest.approx(-advantage * ratio if moves else 0.0, rel=1e-6)
    assert float(stats["policy/clip_fraction"][0]) == float(abs(ratio - 1) > 0.2)


def test_values_are_clipped_around_the_old_ones_without_a_maximum() -> None:
    values = torch.tensor([[1.2, 2.0, -2.0]]).requires_grad_()
    loss, _ = value_loss(
        values=values,
        old_values=torch.ones(1, 3),
        returns=torch.tensor([[2.0, 3.0, 0.5]]),
        response_mask=torch.ones(1, 3, dtype=torch.bool),
        clip_range_vf=0.5,
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx((1.2 - 2) ** 2 + (1.5 - 3) ** 2 + (0.5 - 0.5) ** 2, rel=1e-6)
    torch.testing.assert_close(values.grad, torch.tensor([[2 * (1.2 - 2), 0.0, 0.0]]), rtol=1e-6, atol=0)


def test_entropy_is_rewarded_and_value_errors_are_weighted() -> None:
    inputs = tensors()
    mask = inputs["response_mask"]
    base, _, stats = loss_and_gradients(inputs, vf_coef=0.0, ent_coef=0.0)
    full, gradients, _ = loss_and_gradients(inputs, vf_coef=0.7, ent_coef=0.3)
    assert float(base) == float(stats["loss/policy"][0])
    expected = base + 0.7 * stats["loss/value"][0] - 0.3 * inputs["entropy"][mask].sum()
    torch.testing.assert_close(full, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients["entropy"], -0.3 * mask.float(), rtol=0, atol=1e-7)


def test_an_empty_mask_gives_zero_loss_and_zero_gradients() -> None:
    inputs = {k: torch.full_like(x, torch.nan) if x.is_floating_point() else x & False for k, x in tensors().items()}
    loss, gradients, stats = loss_and_gradients(inputs)
    assert loss == 0 and all(not gradient.any() for gradient in gradients.values())
    assert all(total == 0 and count == 0 for total, count in stats.values())
    assert max_ratio(inputs["logprobs"], inputs["old_logprobs"], inputs["response_mask"]) == 0


def test_equal_policies_have_ratio_one_and_no_kl() -> None:
    inputs = tensors()
    _, _, stats = loss_and_gradients({**inputs, "old_logprobs": inputs["logprobs"]})
    assert stats["policy/ratio"][0] == stats["policy/ratio"][1]
    assert stats["policy/approx_kl"][0] == 0 and stats["policy/clip_fraction"][0] == 0


@pytest.mark.parametrize(
    "advantage, ratio, expected_loss, moves",
    [
        (2.0, 1.3, -2.6, True),  # inside the wider upper side
        (2.0, 1.6, -3.0, False),
        (-2.0, 0.7, 1.6, False),  # the lower side is as before
        (-2.0, 2.5, 5.0, True),
        (-2.0, 4.0, 6.0, False),  # dual clip: no more than 3 · |A|
        (2.0, 4.0, -3.0, False),  # and only where the advantage is negative
    ],
)
def test_clip_higher_and_dual_clip(advantage: float, ratio: float, expected_loss: float, moves: bool) -> None:
    logprobs = torch.tensor([[ratio]]).log().requires_grad_()
    loss, stats = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 1),
        advantages=torch.tensor([[advantage]]),
        response_mask=torch.ones(1, 1, dtype=torch.bool),
        clip_range=0.2,
        clip_range_high=0.5,
        dual_clip=3.0,
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected_loss, rel=1e-6)
    assert float(logprobs.grad) == pytest.approx(-advantage * ratio if moves else 0.0, rel=1e-6)
    assert float(stats["policy/clip_fraction"][0]) == float(ratio < 0.8 or ratio > 1.5)


def test_the_larger_of_both_value_errors_where_that_is_asked_for() -> None:
    arguments = {
        "values": torch.tensor([[1.2, 2.0, -2.0]]),
        "old_values": torch.ones(1, 3),
        "returns": torch.tensor([[2.0, 3.0, 0.5]]),
        "response_mask": torch.ones(1, 3, dtype=torch.bool),
        "clip_range_vf": 0.5,
    }
    # Unclipped errors 0.8, 1, 2.5; clipped ones 0.8, 1.5, 0.
    loss, _ = value_loss(**arguments, clip_max=True)  # type: ignore[arg-type]
    assert float(loss) == pytest.approx(0.8**2 + 1.5**2 + 2.5**2, rel=1e-6)


def test_the_kl_in_the_loss_and_the_warm_up_of_the_critic() -> None:
    inputs, kl = tensors(), torch.rand(4, 5)
    mask = inputs["response_mask"]
    plain, _, _ = loss_and_gradients(inputs)
    with_kl, _, stats = loss_and_gradients(inputs, kl=kl, kl_coef=0.7)
    torch.testing.assert_close(with_kl, plain + 0.7 * kl[mask].sum())
    assert float(stats["loss/kl"][0]) == pytest.approx(float(kl[mask].sum()))
    warm, gradients, stats = loss_and_gradients(inputs, kl=kl, kl_coef=0.7, policy_coef=0.0)
    torch.testing.assert_close(warm, HYPER["vf_coef"] * stats["loss/value"][0])
    assert not gradients["logprobs"].any() and not gradients["entropy"].any() and gradients["values"].any()
