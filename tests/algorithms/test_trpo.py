"""TRPO's surrogate, full KL and Fisher products, against PyTorch's own formulas and finite differences."""

from collections.abc import Callable

import pytest
import torch
from small_policy import Policy, dense_fisher, episodes
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from algorithms import a2c, ppo
from algorithms.trpo import fisher_vector_product, kl_sum, sub_sample, surrogate
from algorithms.trust_region import assign, flatten, trainable


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_garbage_outside_the_mask_does_not_reach_the_surrogate(garbage: float) -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(2, 3, generator=generator) for _ in range(3))
    mask = torch.tensor([[True, True, False], [True, False, False]])

    def results(fill: float) -> tuple[Tensor, Tensor]:
        dirty = [torch.where(mask, x, fill) for x in (new, old, advantages)]
        leaf = dirty[0].requires_grad_()
        total, stats = surrogate(leaf, *dirty[1:], mask)
        total.backward()
        assert float(stats["loss/policy"][0]) == -float(total.detach()) and stats["loss/policy"][1] == 3
        return total.detach(), leaf.grad

    total, gradient = results(garbage)
    ratio = (new - old).exp()
    torch.testing.assert_close(total, (ratio * advantages)[mask].sum())
    torch.testing.assert_close(gradient, torch.where(mask, ratio * advantages, 0))


def test_at_ratio_one_ppo_a2c_and_trpo_have_one_policy_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = (torch.randn(4, 5, generator=generator) for _ in range(2))
    mask = torch.arange(5) < torch.tensor([5, 2, 0, 3])[:, None]
    common = {"advantages": advantages, "response_mask": mask}
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "a2c": lambda new: a2c.policy_loss(logprobs=new, **common)[0],
        "ppo": lambda new: ppo.policy_loss(logprobs=new, old_logprobs=logprobs, clip_range=0.2, **common)[0],
        "trpo": lambda new: -surrogate(new, logprobs, advantages, mask)[0],
    }
    gradients = {name: torch.func.grad(loss)(logprobs) for name, loss in losses.items()}
    assert gradients["a2c"][mask].all()
    assert torch.equal(gradients["ppo"], gradients["a2c"]) and torch.equal(gradients["trpo"], gradients["a2c"])


def test_the_kl_is_the_full_one_of_the_restricted_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = (3 * torch.randn(6, 8, generator=generator) for _ in range(2))
    mask = torch.rand(6, 8, generator=generator) < 0.6
    mask[:, 0] = True
    terms = [
        kl_divergence(Categorical(logits=a[m]), Categorical(logits=b[m]))
        for a, b, m in zip(old, new, mask, strict=True)
    ]
    torch.testing.assert_close(kl_sum(old, new, mask), torch.stack(terms).sum())
    torch.testing.assert_close(
        kl_sum(old.masked_fill(~mask, -torch.inf) + 5, new.masked_fill(~mask, -torch.inf)), torch.stack(terms).sum()
    )
    torch.testing.assert_close(kl_sum(old, new), kl_divergence(Categorical(logits=old), Categorical(logits=new)).sum())
    assert kl_sum(old, old, mask) == 0 == kl_sum(old[:0], new[:0])


def test_the_kl_and_both_derivatives_ignore_what_the_mask_excludes() -> None:
    old, new = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([True, True, False, True]).expand(3, 4)

    def derivatives(fill: float) -> tuple[Tensor, Tensor, Tensor]:
        leaf = torch.where(mask, new, fill).requires_grad_()
        value = kl_sum(torch.where(mask, old, fill), leaf, mask)
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        (second,) = torch.autograd.grad((first * torch.arange(4.0)).sum(), leaf)
        return value.detach(), first.detach(), second

    expected = derivatives(0.0)
    assert expected[2][mask].all() and not expected[2][~mask].any()
    for fill in (torch.nan, torch.inf, -torch.inf):
        torch.testing.assert_close(derivatives(fill), expected, rtol=0, atol=0)
    excluded = new.masked_fill(~mask, -torch.inf)
    assert torch.autograd.gradgradcheck(lambda x: kl_sum(old, x, mask), new.clone().requires_grad_())
    assert kl_sum(old, excluded) == torch.inf  # the new policy excludes what the old one allowed
    assert kl_sum(torch.where(mask, old, -1e4), excluded).isfinite()  # unless its probability is zero in any case


def test_fisher_product_is_the_finite_difference_of_the_kl_gradient() -> None:
    policy = Policy()
    policy.allowed[2] = False
    part, params = episodes(policy), trainable(policy)
    old, count = flatten(params), float(part.mask.sum())
    before = policy.logits(part).detach()
    vector = torch.randn(len(old), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def kl_gradient(at: Tensor) -> Tensor:
        assign(params, at)
        value = kl_sum(before, policy.logits(part)) / count
        return flatten(torch.autograd.grad(value, params, allow_unused=True, materialize_grads=True))

    difference = (kl_gradient(old + 1e-5 * vector) - kl_gradient(old - 1e-5 * vector)) / 2e-5
    assign(params, old)
    product = fisher_vector_product(policy.kl, vector, params, [part], count, lambda x: x)
    torch.testing.assert_close(product, difference, rtol=1e-6, atol=1e-8)
    assert product.norm() > 0.1 and not product[:2].any()  # the first two belong to the unused weight


def test_fisher_matrix_is_symmetric_and_not_negative_and_adds_up_over_micro_batches() -> None:
    policy = Policy()
    part = episodes(policy)
    matrix = dense_fisher(policy, part)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    assert eigenvalues.min() > -1e-12 and eigenvalues.max() > 0.1
    vector, params = torch.ones(len(matrix), dtype=torch.float64), trainable(policy)
    parts = [part.rows(slice(i, i + 1)) for i in range(6)]  # one of them without a token
    product = fisher_vector_product(policy.kl, vector, params, parts, float(part.mask.sum()), lambda x: x)
    torch.testing.assert_close(product, matrix @ vector, rtol=0, atol=1e-12)


def test_sub_sampling_keeps_every_kth_token_and_at_least_one() -> None:
    mask = torch.tensor([[True, True, False, True], [False, True, True, False]])
    expected = torch.tensor([[True, False, False, True], [False, False, True, False]])
    assert torch.equal(sub_sample(mask, 2), expected)
    assert torch.equal(sub_sample(mask, 1), mask)
    assert sub_sample(mask, 100).sum() == 1 and not sub_sample(mask & False, 2).any()
