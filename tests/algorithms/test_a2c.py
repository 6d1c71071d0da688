"""The A2C loss on hand-made tensors: signs, weights, sums, and what stands outside the mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.a2c import a2c_loss, policy_loss

LEARNT = ("logprobs", "entropy", "values")
HYPER = {"vf_coef": 0.5, "ent_coef": 0.1}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = (*LEARNT, "advantages", "returns")
    made = {name: torch.randn(4, 5, generator=generator) for name in names}
    return {**made, "response_mask": torch.arange(5) < torch.tensor([5, 2, 0, 3])[:, None]}


def loss_and_gradients(inputs: dict[str, Tensor], **hyper: float) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEARNT}
    loss, stats = a2c_loss(**{**inputs, **leaves}, **{**HYPER, **hyper})
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}, stats


def test_each_term_has_its_sign_and_weight() -> None:
    one = torch.ones(1, 1, dtype=torch.bool)
    leaves = {"logprobs": -1.5, "entropy": 2.0, "values": 3.0}
    leaves = {name: torch.tensor([[value]], requires_grad=True) for name, value in leaves.items()}
    rest = {"advantages": torch.tensor([[4.0]]), "returns": torch.tensor([[1.0]]), "response_mask": one}
    loss, stats = a2c_loss(**leaves, **rest, vf_coef=0.25, ent_coef=0.5)
    loss.backward()
    assert float(loss.detach()) == 4 * 1.5 + 0.25 * (3 - 1) ** 2 - 0.5 * 2
    assert {name: float(leaf.grad) for name, leaf in leaves.items()} == {"logprobs": -4, "entropy": -0.5, "values": 1}
    assert {name: (float(total), int(count)) for name, (total, count) in stats.items()} == {
        "loss/policy": (6.0, 1),
        "loss/value": (4.0, 1),
        "policy/entropy": (2.0, 1),
        "loss/total": (6.0, 1),
    }


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_garbage_outside_the_mask_changes_nothing(garbage: float) -> None:
    inputs = tensors()
    mask = inputs["response_mask"]
    dirty = {k: x if x is mask else torch.where(mask, x, garbage) for k, x in inputs.items()}
    expected = loss_and_gradients(inputs)
    torch.testing.assert_close(loss_and_gradients(dirty), expected, rtol=0, atol=0)
    assert all(gradient[mask].all() and not gradient[~mask].any() for gradient in expected[1].values())


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


def test_an_empty_mask_gives_zero_loss_and_zero_gradients() -> None:
    inputs = {k: torch.full_like(x, torch.nan) if x.is_floating_point() else x & False for k, x in tensors().items()}
    loss, gradients, stats = loss_and_gradients(inputs)
    assert loss == 0 and all(not gradient.any() for gradient in gradients.values())
    assert all(total == 0 and count == 0 for total, count in stats.values())


def test_the_gradient_does_not_depend_on_how_likely_the_tokens_are() -> None:
    inputs = tensors()
    less_likely = {**inputs, "logprobs": inputs["logprobs"] - 7}
    torch.testing.assert_close(loss_and_gradients(less_likely)[1], loss_and_gradients(inputs)[1], rtol=0, atol=0)
    advantages, mask = inputs["advantages"], inputs["response_mask"]
    logprobs = inputs["logprobs"].clone().requires_grad_()
    policy_loss(logprobs=logprobs, advantages=advantages, response_mask=mask)[0].backward()
    assert torch.equal(logprobs.grad, torch.where(mask, -advantages, 0))
