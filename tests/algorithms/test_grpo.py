"""Group-relative advantages and the critic-free losses, against hand calculations."""

import math

import pytest
import torch

from algorithms.advantages import gae, group_advantages
from algorithms.grpo import grpo_loss, loss_count, token_weights
from algorithms.ppo import ppo_loss

MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])
LENGTHS = torch.tensor([4, 2])


def test_one_group_by_hand() -> None:
    """Rewards 1, 2, 6: mean 3, deviations -2, -1, 3, unbiased variance (4 + 1 + 9) / 2 = 7."""
    rewards = torch.tensor([[1.0, 2.0, 6.0]])
    expected = torch.tensor([[-2.0, -1.0, 3.0]])
    assert torch.allclose(group_advantages(rewards, estimator="grpo"), expected / (math.sqrt(7) + 1e-4))
    assert torch.allclose(group_advantages(rewards, estimator="grpo", scale=False), expected)
    # Leave one out: 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2.
    assert torch.allclose(group_advantages(rewards, estimator="rloo"), torch.tensor([[-3.0, -1.5, 4.5]]))


def test_groups_do_not_mix_and_equal_rewards_teach_nothing() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0], [100.1, 100.1, 100.1]])
    for estimator in ("grpo", "rloo"):
        both = group_advantages(rewards, estimator=estimator)
        assert torch.equal(both[:1], group_advantages(rewards[:1], estimator=estimator))
        assert torch.equal(both[1], torch.zeros(3))
        assert torch.allclose(group_advantages(rewards + 7, estimator=estimator), both, atol=1e-6)


def test_rewards_that_differ_by_rounding_teach_nothing() -> None:
    for value in (0.3, 0.7, 10.1, 100.1, 1000.7):
        equal = torch.full((1, 8), value)
        assert not group_advantages(equal, estimator="grpo").any(), value
    assert group_advantages(torch.tensor([[0.3, 0.3000001]]), estimator="grpo").abs().max() < 1e-3


def test_reward_to_go_is_gae_without_values() -> None:
    """r = (1, 2, 4) and γ = ½: 1 + 2/2 + 4/4, 2 + 4/2, 4."""
    rewards, zero = torch.tensor([[1.0, 2.0, 4.0, 9.0]]), torch.zeros(1, 4)
    mask = torch.tensor([[True, True, True, False]])
    found, _ = gae(rewards, zero, mask, torch.zeros(1), gamma=0.5, gae_lambda=1.0)
    assert found.tolist() == [[3.0, 4.0, 4.0, 0.0]]


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        # -A·ρ at ratio 1, A = 3 on four tokens and -1 on two.
        ("token", (4 * -3 + 2 * 1) / 6),
        ("sequence", (-3 + 1) / 2),
        ("constant", (4 * -3 + 2 * 1) / (2 * 10)),
    ],
)
def test_loss_by_hand(normalization: str, expected: float) -> None:
    logprobs = torch.full((2, 4), -1.5, requires_grad=True)
    loss, stats = grpo_loss(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        entropy=torch.zeros(2, 4),
        advantages=torch.tensor([[3.0], [-1.0]]).expand(2, 4),
        weights=token_weights(MASK, LENGTHS, normalization),
        count=loss_count(MASK, LENGTHS, normalization, 10),
        response_mask=MASK,
        clip_range=0.2,
        ent_coef=0.0,
        kl_coef=0.0,
    )
    assert float(loss.detach() / loss_count(MASK, LENGTHS, normalization, 10)) == pytest.approx(expected)
    total, count = stats["loss/policy"]
    assert float(total / count) == pytest.approx(expected)
    assert float(stats["policy/ratio"][0]) == 6 and float(stats["policy/ratio"][1]) == 6


def test_a_response_weighs_the_same_however_long_it_is_with_sequence_only() -> None:
    for normalization, ratio in (("token", 2.0), ("sequence", 1.0), ("constant", 2.0)):
        weights = token_weights(MASK, LENGTHS, normalization).sum(1)
        assert float(weights[0] / weights[1]) == pytest.approx(ratio)


def test_a_response_that_the_budget_cuts_weighs_its_share() -> None:
    """Three of ten tokens: each weighs as it would in the whole response."""
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    lengths = torch.tensor([10, 2])
    assert torch.allclose(token_weights(mask, lengths, "sequence").sum(1), torch.tensor([0.3, 1.0]))
    counts = [
        float(loss_count(mask, lengths, normalization, 20)) for normalization in ("token", "sequence", "constant")
    ]
    assert counts == pytest.approx([5, 1.3, 26])


def test_with_weights_of_one_it_is_ppo_without_a_critic() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(2, 4, generator=draw) for name in ("logprobs", "old_logprobs", "advantages", "kl")}
    shared = {**tensors, "entropy": torch.rand(2, 4, generator=draw), "response_mask": MASK, "clip_range": 0.1}
    shared |= {"clip_range_high": 0.3, "dual_clip": 2.0, "ent_coef": 0.1, "kl_coef": 0.2}
    zero = torch.zeros(2, 4)
    ours, stats = grpo_loss(**shared, weights=MASK.float(), count=MASK.sum())
    theirs, expected = ppo_loss(**shared, values=zero, old_values=zero, returns=zero, clip_range_vf=None, vf_coef=0.5)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(stats[name][0], expected[name][0]) for name in stats)


def test_what_does_not_count_changes_nothing() -> None:
    def loss(fill: float) -> float:
        x = torch.where(MASK, 0.3, fill)
        found, _ = grpo_loss(
            logprobs=x, old_logprobs=x, entropy=x, kl=x, advantages=x, count=MASK.sum(),
            weights=token_weights(MASK, LENGTHS, "sequence"),
            response_mask=MASK, clip_range=0.2, ent_coef=0.1, kl_coef=0.1,
        )  # fmt: skip
        return float(found)

    assert loss(0.0) == loss(math.nan)
