"""Flat parameter vectors, conjugate gradient and backtracking on problems whose answers are known."""

import pytest
import torch
from torch import Tensor, nn

from algorithms import trust_region
from algorithms.trust_region import assign, conjugate_gradient, dot, flatten, line_search, split_like, trainable


def positive_matrix(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    root = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (root @ root.T / size + 0.1 * torch.eye(size, dtype=torch.float64)).to(dtype)


def vector(size: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that -0.0 differs from 0.0 and NaN equals itself."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def test_parameters_survive_the_way_to_a_vector_and_back_bit_for_bit() -> None:
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, 1e-45, 1 / 3])
    params = [
        special.reshape(2, 3),
        torch.tensor(2.5),
        torch.arange(6.0).view(2, 3).T,
        torch.tensor([0.1, -0.0, 1e-39]).bfloat16(),
        torch.tensor([0.1, 6e-8]).half(),
    ]
    before = [bits(p) for p in params]
    flat = flatten(params)
    assert flat.dtype == torch.float32 and flat.shape == (6 + 1 + 6 + 3 + 2,)
    for parameter in params:
        parameter.zero_()
    assign(params, flat)
    assert all(torch.equal(bits(p), old) for p, old in zip(params, before, strict=True))


def test_a_flat_vector_is_a_copy_and_float64_stays_float64() -> None:
    parameter = nn.Parameter(torch.tensor([1 / 3], dtype=torch.float64))
    flat = flatten([parameter])
    assign([parameter], torch.zeros(1))
    assert flat.dtype == torch.float64 and not flat.requires_grad and float(flat) == 1 / 3


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(RuntimeError, match="split"):
        split_like(torch.zeros(5), [torch.zeros(2), torch.zeros(2)])


def test_frozen_parameters_are_left_out_and_tied_ones_come_once() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    assert trainable(model) == [model[0].weight, model[0].bias]


def test_inner_products_are_summed_in_float64_over_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_region, "_DOT_CHUNK", 2)
    a = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0])
    assert dot(a, torch.ones(5)) == 5.0


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_conjugate_gradient_solves_as_a_dense_solver_does(dtype: torch.dtype, tolerance: float) -> None:
    a, g = positive_matrix(12, dtype=dtype), vector(12, dtype=dtype)
    x, residual = conjugate_gradient(lambda v: a @ v, g, max_steps=40, tolerance=1e-24)
    exact = torch.linalg.solve(a.double(), g.double()).to(dtype)
    assert x.dtype == dtype
    torch.testing.assert_close(x, exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(residual, g - a @ x, rtol=0, atol=tolerance)


def test_conjugate_gradient_stops_at_the_limit_and_the_tolerance_and_reports_its_residual() -> None:
    a, g, products = positive_matrix(12), vector(12), []

    def product(v: Tensor) -> Tensor:
        products.append(v)
        return a @ v

    x, residual = conjugate_gradient(product, g, max_steps=4)
    assert len(products) == 4
    assert dot(residual, residual) > 1e-3
    torch.testing.assert_close(residual, g - a @ x)
    products.clear()
    _, residual = conjugate_gradient(product, g, max_steps=40, tolerance=dot(residual, residual) * 1.01)
    assert len(products) == 4


def test_conjugate_gradient_takes_one_step_however_small_the_gradient() -> None:
    g = 1e-9 * vector(3)
    x, _ = conjugate_gradient(lambda v: 2 * v, g)
    torch.testing.assert_close(x, g / 2, rtol=1e-12, atol=0)


def test_no_gradient_needs_no_product() -> None:
    x, residual = conjugate_gradient(lambda _: pytest.fail("called"), torch.zeros(3))
    assert not x.any() and not residual.any()


@pytest.mark.parametrize("factor", [-1.0, 0.0, torch.nan])
def test_without_positive_curvature_the_answer_is_zero(factor: float) -> None:
    g = vector(3)
    x, residual = conjugate_gradient(lambda v: factor * v, g)
    assert not x.any() and torch.equal(residual, g)


def test_negative_curvature_met_late_keeps_what_was_reached() -> None:
    a, g = torch.diag(torch.tensor([1.0, 4.0, -0.5])), torch.tensor([1.0, 1.0, 0.1])
    assert g @ a @ g > 0
    x, residual = conjugate_gradient(lambda v: a @ v, g)
    assert x.any() and x.isfinite().all()
    torch.testing.assert_close(residual, g - a @ x)


def test_backtracking_takes_the_first_point_inside_the_region_that_improves() -> None:
    old, step, points = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -1.0]), []
    answers = iter([(2.0, 0.011), (2.0, 0.01), (1.0, 0.0), (torch.nan, 0.0), (2.0, torch.nan), (1.5, 0.009)])

    def evaluate(point: Tensor) -> tuple[float, float]:
        points.append(point)
        return next(answers)

    found = line_search(evaluate, old, step, objective=1.0, target_kl=0.01)
    for i, point in enumerate(points):
        torch.testing.assert_close(point, old + 0.8**i * step)
    assert found.accepted and found.tries == 6 and found.parameters is points[5]
    assert (found.kl, found.improvement, found.scale) == (0.009, 0.5, 0.8**5)
    assert torch.equal(old, torch.tensor([1.0, 2.0]))


def test_backtracking_gives_the_old_point_itself_back_after_the_last_try() -> None:
    old, points = vector(3), []
    found = line_search(lambda p: points.append(p) or (0.0, 0.0), old, vector(3), objective=0.0, target_kl=1.0)
    assert len(points) == found.tries == 10 and found.parameters is old
    assert (found.accepted, found.kl, found.improvement, found.scale) == (False, 0.0, 0.0, 0.0)


def test_a_step_of_zeros_is_refused_without_a_try() -> None:
    old = vector(3)
    found = line_search(lambda _: pytest.fail("called"), old, torch.zeros(3), objective=0.0, target_kl=1.0)
    assert not found.accepted and found.tries == 0 and found.parameters is old
