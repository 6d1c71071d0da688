"""Token rewards, the KL controller and GAE on examples small enough to calculate by hand."""

import pytest
import torch
from torch import Tensor

from algorithms.advantages import gae, kl_estimate, kl_penalty, shape_rewards, token_rewards, update_kl_coef

YES, NO = True, False


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


def mask(*values: bool) -> Tensor:
    return torch.tensor([values])


def one_gae(rewards: Tensor, values: Tensor, counted: Tensor, bootstrap: float) -> tuple[Tensor, Tensor]:
    return gae(rewards, values, counted, torch.tensor([bootstrap]), gamma=0.5, gae_lambda=0.5)


def test_kl_is_the_log_ratio_to_the_reference() -> None:
    assert torch.equal(kl_estimate(row(-1, -2), row(-3, -1.5)), row(2, -0.5))


def test_every_token_pays_for_its_kl_the_last_included() -> None:
    task, kl = row(0, 0, 5, 7), row(1, -2, 4, 9)
    assert torch.equal(token_rewards(task, kl, mask(YES, YES, YES, NO), kl_coef=0.5), row(-0.5, 1, 3, 0))


def test_rewards_outside_the_mask_are_zero_whatever_stands_there() -> None:
    task, kl = row(1, torch.nan, 2, torch.inf), row(0, 1, 1, torch.nan)
    assert torch.equal(token_rewards(task, kl, mask(YES, NO, YES, NO), kl_coef=1.0), row(1, 0, 1, 0))


@pytest.mark.parametrize(
    "kl, expected",
    [(2.0, 1.0), (2.2, 1.01), (1.8, 0.99), (2.4, 1.02), (1e9, 1.02), (1.6, 0.98), (0.0, 0.98), (-50.0, 0.98)],
)
def test_the_kl_coefficient_moves_towards_the_target_by_at_most_two_percent(kl: float, expected: float) -> None:
    assert update_kl_coef(0.3, kl, 2.0) == pytest.approx(0.3 * expected, rel=1e-12)


def test_without_a_target_the_kl_coefficient_stays() -> None:
    assert update_kl_coef(0.3, 1e9, None) == 0.3


def test_gae_of_an_episode_that_ended() -> None:
    # δ = (1 + .5·2 - 4, 2 + .5·6 - 2, 3 + 0 - 6) = (-2, 3, -3); A = (-2 + .25·2.25, 3 - .25·3, -3)
    advantages, returns = one_gae(row(1, 2, 3), row(4, 2, 6), mask(YES, YES, YES), 0.0)
    assert torch.equal(advantages, row(-1.4375, 2.25, -3))
    assert torch.equal(returns, row(2.5625, 4.25, 3))


def test_gae_of_an_episode_that_was_cut_bootstraps() -> None:
    # δ_2 = 3 + .5·8 - 6 = 1; A = (-2 + .25·3.25, 3 + .25·1, 1)
    advantages, returns = one_gae(row(1, 2, 3), row(4, 2, 6), mask(YES, YES, YES), 8.0)
    assert torch.equal(advantages, row(-1.1875, 3.25, 1))
    assert torch.equal(returns, row(2.8125, 5.25, 7))


def test_padding_after_the_end_changes_nothing() -> None:
    short = one_gae(row(1, 2, 3), row(4, 2, 6), mask(YES, YES, YES), 8.0)
    rewards, values = row(1, 2, 3, torch.nan, 5), row(4, 2, 6, torch.inf, torch.nan)
    long = one_gae(rewards, values, mask(YES, YES, YES, NO, NO), 8.0)
    for a, b in zip(short, long, strict=True):
        assert torch.equal(torch.nn.functional.pad(a, (0, 2)), b)


def test_tokens_of_the_environment_are_no_transitions() -> None:
    dense = one_gae(row(1, 2, 3), row(4, 2, 6), mask(YES, YES, YES), 8.0)
    gaps = mask(YES, NO, NO, YES, YES, NO)
    rewards, values = row(1, 50, torch.nan, 2, 3, 60), row(4, 70, torch.nan, 2, 6, 80)
    for a, b in zip(dense, one_gae(rewards, values, gaps, 8.0), strict=True):
        assert torch.equal(a[0], b[gaps]) and not b[~gaps].any()


def test_each_row_of_a_batch_is_its_own_episode() -> None:
    torch.manual_seed(0)
    rewards, values, bootstrap = torch.randn(5, 6), torch.randn(5, 6), torch.randn(5)
    counted = torch.arange(6) < torch.tensor([6, 1, 3, 0, 5])[:, None]
    together = gae(rewards, values, counted, bootstrap, gamma=0.97, gae_lambda=0.9)
    for i in range(5):
        rows = slice(i, i + 1)
        alone = gae(rewards[rows], values[rows], counted[rows], bootstrap[rows], gamma=0.97, gae_lambda=0.9)
        assert torch.equal(together[0][rows], alone[0]) and torch.equal(together[1][rows], alone[1])


def test_with_lambda_one_returns_are_discounted_sums() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(1, 6), torch.randn(1, 6)
    _, returns = gae(rewards, values, torch.ones(1, 6, dtype=torch.bool), torch.tensor([2.0]), gamma=0.9, gae_lambda=1)
    expected = [sum(0.9 ** (k - t) * rewards[0, k] for k in range(t, 6)) + 0.9 ** (6 - t) * 2.0 for t in range(6)]
    torch.testing.assert_close(returns[0], torch.stack(expected), rtol=1e-5, atol=2e-6)


def test_estimators_of_the_kl() -> None:
    kl = torch.tensor([-0.5, 0.0, 2.0])
    assert torch.equal(kl_penalty(kl, "k1"), kl)
    assert torch.allclose(kl_penalty(kl, "k2"), torch.tensor([0.125, 0.0, 2.0]))
    assert torch.allclose(kl_penalty(kl, "k3"), (-kl).exp() - 1 + kl)
    assert (kl_penalty(kl, "k2") >= 0).all() and (kl_penalty(kl, "k3") >= 0).all()


@pytest.mark.parametrize(("estimator", "of"), [("k2", "own"), ("k3", "reference")])
def test_gradients_of_the_estimators_in_the_loss_are_those_of_exact_kls(estimator: str, of: str) -> None:
    """Means over all tokens, each with its probability under the policy: k2 leads down KL(π ‖ π_ref), k3 down
    KL(π_ref ‖ π); k1 leads nowhere."""
    torch.manual_seed(0)
    logits, ref = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(6, dtype=torch.float64)
    own, reference = logits.log_softmax(0), ref.log_softmax(0)
    weights = own.detach().exp()
    (found,) = torch.autograd.grad((weights * kl_penalty(own - reference, estimator)).sum(), logits, retain_graph=True)
    (nothing,) = torch.autograd.grad((weights * (own - reference)).sum(), logits, retain_graph=True)
    exact = (own.exp() * (own - reference)).sum() if of == "own" else (reference.exp() * (reference - own)).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(found, expected)
    assert float(nothing.abs().max()) < 1e-12 and float(expected.abs().max()) > 0.01


def test_rewards_are_scaled_then_clipped_then_punished() -> None:
    task = torch.tensor([[0.0, 3.0, 0.0], [-5.0, 0.0, 1.0], [0.5, 0.0, 0.0]])
    whole = torch.tensor([[YES, YES, NO], [YES, YES, YES], [YES, NO, NO]])
    truncated = torch.tensor([NO, YES, YES])
    plain = {"scale": 1.0, "clip": None, "missing_eos_penalty": 0.0}
    assert torch.equal(shape_rewards(task, whole, truncated, **plain), task)  # type: ignore[arg-type]
    found = shape_rewards(task, whole, truncated, scale=0.5, clip=1.0, missing_eos_penalty=2.0)
    assert found.tolist() == [[0.0, 1.0, 0.0], [-1.0, 0.0, -1.5], [-1.75, 0.0, 0.0]]
