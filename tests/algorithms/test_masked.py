"""Masked statistics: what stands outside the mask, NaN included, changes nothing."""

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.masked import masked_sum, mean_and_std, moments, whiten

MASK = torch.tensor([[True, True, False, True], [False, True, False, False], [False] * 4])
X = torch.tensor([[1.5, -2.0, 9.0, 0.25], [9.0, 4.0, 9.0, 9.0], [9.0] * 4])
KEPT = X[MASK].double().numpy()
GARBAGE = [torch.nan, torch.inf, -torch.inf, 3.4e38]


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    return whiten(x, mask, moments(x, mask))


FUNCTIONS = [masked_sum, moments, whitened]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_garbage_outside_the_mask_changes_neither_values_nor_gradients(function, garbage: float) -> None:
    results = []
    for fill in (0.0, garbage):
        x = torch.where(MASK, X, fill).requires_grad_()
        y = function(x, MASK)
        (y * torch.arange(1, y.numel() + 1).view_as(y)).sum().backward()
        results.append((y, x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert not results[0][1][~MASK].any() and results[0][1][MASK].any()


def test_sum_and_mean_are_of_the_masked_values() -> None:
    assert float(masked_sum(X, MASK)) == KEPT.sum()


def test_moments_add_up_over_any_split() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(12, 7) + 3, torch.rand(12, 7) < 0.6
    for parts in ([12], [5, 7], [1] * 12, [11, 1]):
        total = sum(moments(a, b) for a, b in zip(x.split(parts), mask.split(parts), strict=True))
        torch.testing.assert_close(total, moments(x, mask), rtol=1e-14, atol=0)
    kept = x[mask].double()
    torch.testing.assert_close(
        moments(x, mask), torch.stack([kept.sum(), (kept**2).sum(), mask.sum().double()]), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("unbiased", [True, False])
def test_mean_and_std_and_whitening_equal_numpy(unbiased: bool) -> None:
    mean, std = KEPT.mean(), KEPT.std(ddof=int(unbiased))
    got = mean_and_std(moments(X, MASK), unbiased=unbiased)
    assert [float(v) for v in got] == pytest.approx([mean, std], rel=1e-12)
    white = whiten(X, MASK, moments(X, MASK), unbiased=unbiased)
    np.testing.assert_allclose(white[MASK].numpy(), (KEPT - mean) / (std + 1e-8), rtol=1e-6)
    assert white.dtype == torch.float32 and not white[~MASK].any()


def test_whitening_keeps_its_digits_far_from_zero() -> None:
    x = torch.tensor([[1000.0, 1000.5, 1001.0]])
    mask = torch.ones_like(x, dtype=torch.bool)
    torch.testing.assert_close(whitened(x, mask), torch.tensor([[-1.0, 0.0, 1.0]]), rtol=1e-6, atol=1e-6)


def test_parts_are_whitened_with_the_moments_of_all() -> None:
    total = moments(X, MASK)
    parts = [whiten(x, mask, total) for x, mask in zip(X.split(1), MASK.split(1), strict=True)]
    assert torch.equal(torch.cat(parts), whiten(X, MASK, total))


@pytest.mark.parametrize("x", [torch.full((2, 3), torch.nan), torch.ones(2, 3), torch.empty(0, 3)])
def test_an_empty_mask_gives_zeros(x: Tensor) -> None:
    mask = torch.zeros_like(x, dtype=torch.bool)
    assert masked_sum(x, mask) == 0
    assert torch.equal(moments(x, mask), torch.zeros(3, dtype=torch.float64))
    assert [float(v) for v in mean_and_std(moments(x, mask), unbiased=True)] == [0, 0]
    assert torch.equal(whitened(x, mask), torch.zeros_like(x))


def test_one_value_has_no_deviation() -> None:
    x, mask = torch.tensor([[7.0, torch.nan]]), torch.tensor([[True, False]])
    assert [float(v) for v in mean_and_std(moments(x, mask), unbiased=True)] == [7, 0]
    assert torch.equal(whitened(x, mask), torch.zeros(1, 2))
