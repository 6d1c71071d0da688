"""GAE, PPO, A2C and TRPO against numbers recorded from Stable-Baselines3 and sb3-contrib on a tabular policy.

The file is tests/golden/sb3.json.
"""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.a2c import a2c_loss
from algorithms.advantages import gae
from algorithms.logprobs import selective_log_softmax
from algorithms.masked import moments, whiten
from algorithms.ppo import max_ratio, ppo_loss
from algorithms.trpo import kl_sum, surrogate, trust_region_step

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sb3.json").read_text())
CASES = GOLDEN["cases"]
PPO_CASES, A2C_CASES, TRPO_CASES = ([case for case in CASES if case["kind"] == kind] for kind in ("ppo", "a2c", "trpo"))
# float32 sums of two dozen terms of order 1; the recorded gradients are differences of weights of order 1.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def name(case: dict[str, Any]) -> str:
    return f"{case['name']}-{case['seed']}"


def episodes(case: dict[str, Any]) -> list[tuple[int, int, int, float]]:
    """(env, first step, one after the last, value to bootstrap from) of every episode in the [T, N] arrays."""
    starts, found = case["episode_starts"], []
    for env in range(len(starts[0])):
        first = [t for t in range(len(starts)) if starts[t][env]]
        last_value = 0.0 if case["last_dones"][env] else case["last_values"][env]
        ends = [*first[1:], len(starts)]
        found += [(env, a, b, last_value if b == len(starts) else 0.0) for a, b in zip(first, ends, strict=True)]
    return found


def padded(case: dict[str, Any], key: str, fill: float = 0.0) -> Tensor:
    """A [T, N] array of the file as one right-padded row per episode."""
    rows = [torch.tensor([case[key][t][env] for t in range(a, b)]) for env, a, b, _ in episodes(case)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def mask_of(case: dict[str, Any]) -> Tensor:
    lengths = torch.tensor([b - a for _, a, b, _ in episodes(case)])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def test_the_file_holds_all_cases() -> None:
    assert [name(case) for case in PPO_CASES] == [
        f"{variant}-{seed}" for seed in range(3) for variant in ("ppo_ratio1", "ppo", "ppo_vclip_nonorm")
    ]
    assert [name(case) for case in A2C_CASES + TRPO_CASES] == [
        f"{kind}-{i}" for kind in ("a2c", "trpo") for i in range(3)
    ]
    assert len(CASES) == 15
    assert len({bootstrap != 0 for case in CASES for *_, bootstrap in episodes(case)}) == 2


@pytest.mark.parametrize("case", CASES, ids=name)
def test_gae_equals_sb3(case: dict[str, Any]) -> None:
    mask = mask_of(case)
    bootstrap = torch.tensor([value for *_, value in episodes(case)])
    advantages, returns = gae(
        padded(case, "rewards", torch.nan),
        padded(case, "values", torch.nan),
        mask,
        bootstrap,
        gamma=case["gamma"],
        gae_lambda=case["gae_lambda"],
    )
    torch.testing.assert_close(advantages, padded(case, "advantages"), **TOLERANCE)
    torch.testing.assert_close(returns, padded(case, "returns"), **TOLERANCE)


@pytest.mark.parametrize("case", PPO_CASES, ids=name)
def test_ppo_loss_its_gradients_and_statistics_equal_sb3(case: dict[str, Any]) -> None:
    hyper, mask = case["hyper"], mask_of(case)
    logits_table = torch.tensor(case["logits_table"], requires_grad=True)
    values_table = torch.tensor(case["values_table"], requires_grad=True)
    states, actions = padded(case, "obs").long(), padded(case, "actions").long()
    logprobs, entropy = selective_log_softmax(logits_table[states].flatten(0, 1), actions.flatten())
    advantages = padded(case, "advantages")
    if hyper["normalize_advantage"]:
        advantages = whiten(advantages, mask, moments(advantages, mask))
    loss, stats = ppo_loss(
        logprobs=logprobs.view_as(advantages),
        old_logprobs=padded(case, "old_logprobs", torch.nan),
        entropy=entropy.view_as(advantages),
        values=values_table[states],
        old_values=padded(case, "values", torch.nan),
        advantages=advantages,
        returns=padded(case, "returns", torch.nan),
        response_mask=mask,
        clip_range=hyper["clip_range"],
        clip_range_vf=hyper.get("clip_range_vf"),
        vf_coef=hyper["vf_coef"],
        ent_coef=hyper["ent_coef"],
    )
    (loss / mask.sum()).backward()
    torch.testing.assert_close(logits_table.grad, torch.tensor(case["grad_logits_table"]), **TOLERANCE)
    torch.testing.assert_close(values_table.grad, torch.tensor(case["grad_values_table"]), **TOLERANCE)
    means = {key: float(total / count) for key, (total, count) in stats.items()}
    log = {key.removeprefix("train/"): value for key, value in case["log"].items()}
    expected = {
        "loss/total": log["loss"],
        "loss/policy": log["policy_gradient_loss"],
        "loss/value": log["value_loss"],
        "policy/entropy": -log["entropy_loss"],
        "policy/approx_kl": log["approx_kl"],
        "policy/clip_fraction": log["clip_fraction"],
    }
    assert {key: means[key] for key in expected} == pytest.approx(expected, rel=2e-6, abs=2e-6)
    ratio = (logprobs.view_as(mask) - padded(case, "old_logprobs")).exp()[mask].detach()
    assert means["policy/ratio"] == pytest.approx(float(ratio.mean()), rel=1e-6)
    assert float(max_ratio(logprobs.view_as(mask), padded(case, "old_logprobs", torch.inf), mask)) == float(ratio.max())


@pytest.mark.parametrize("case", A2C_CASES, ids=name)
def test_a2c_loss_its_gradients_and_statistics_equal_sb3(case: dict[str, Any]) -> None:
    mask = mask_of(case)
    logits_table = torch.tensor(case["logits_table"], requires_grad=True)
    values_table = torch.tensor(case["values_table"], requires_grad=True)
    states, actions = padded(case, "obs").long(), padded(case, "actions").long()
    logprobs, entropy = selective_log_softmax(logits_table[states].flatten(0, 1), actions.flatten())
    assert not case["hyper"]["normalize_advantage"]
    loss, stats = a2c_loss(
        logprobs=logprobs.view_as(mask),
        entropy=entropy.view_as(mask),
        values=values_table[states],
        advantages=padded(case, "advantages", torch.nan),
        returns=padded(case, "returns", torch.nan),
        response_mask=mask,
        vf_coef=case["hyper"]["vf_coef"],
        ent_coef=case["hyper"]["ent_coef"],
    )
    (loss / mask.sum()).backward()
    torch.testing.assert_close(logits_table.grad, torch.tensor(case["grad_logits_table"]), **TOLERANCE)
    torch.testing.assert_close(values_table.grad, torch.tensor(case["grad_values_table"]), **TOLERANCE)
    log = case["log"]
    expected = {
        "loss/policy": log["train/policy_loss"],
        "loss/value": log["train/value_loss"],
        "policy/entropy": -log["train/entropy_loss"],
    }
    means = {key: float(total / count) for key, (total, count) in stats.items()}
    assert {key: means[key] for key in expected} == pytest.approx(expected, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("case", TRPO_CASES, ids=name)
def test_trpo_step_equals_sb3_contrib(case: dict[str, Any]) -> None:
    """Conjugate gradient starts at random there, and converges on so few numbers all the same."""
    hyper, mask = case["hyper"], mask_of(case)
    weight = torch.tensor(case["logits_table"], requires_grad=True)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    states, actions = padded(case, "obs").long(), padded(case, "actions").long()
    advantages = padded(case, "advantages")
    advantages = whiten(advantages, mask, moments(advantages, mask))

    def objective(rows: slice) -> Tensor:
        every = (weight[states[rows]] + bias).flatten(0, 1)
        logprobs, _ = selective_log_softmax(every, actions[rows].flatten())
        old = padded(case, "old_logprobs", torch.nan)[rows]
        return surrogate(logprobs.view_as(old), old, advantages[rows], mask[rows])[0]

    metrics = trust_region_step(
        [weight, bias],
        [slice(0, 2), slice(2, None)],
        objective=objective,
        logits=lambda rows: weight[states[rows][mask[rows]]] + bias,
        n_tokens=int(mask.sum()),
        reduce=lambda total: total,
        target_kl=hyper["target_kl"],
        damping=hyper["cg_damping"],
        cg_max_steps=hyper["cg_max_steps"],
    )
    new_table, old_table = (weight + bias).detach(), torch.tensor(case["logits_table"])
    torch.testing.assert_close(new_table, torch.tensor(case["new_logits_table"]), rtol=0, atol=1e-5)
    log, counted = case["log"], states[mask]
    assert metrics["policy/line_search_success"] == log["train/is_line_search_success"]
    # Its KL is that of the new to the old policy; the bound is on the old to the new, as in the paper.
    theirs, ours = (
        float(kl_sum(a[counted], b[counted]) / len(counted)) for a, b in permutations((new_table, old_table))
    )
    assert theirs == pytest.approx(log["train/kl_divergence_loss"], rel=1e-4)
    assert metrics["policy/kl"] == pytest.approx(ours, rel=1e-4)
    reached = float(objective(slice(None)).detach()) / len(counted)
    assert reached == pytest.approx(log["train/policy_objective"], abs=1e-5)
