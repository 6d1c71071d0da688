"""GAE and the PPO loss against numbers recorded from Stable-Baselines3 on a tabular policy (tests/golden/sb3.json)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.advantages import gae
from algorithms.logprobs import selective_log_softmax
from algorithms.masked import moments, whiten
from algorithms.ppo import max_ratio, ppo_loss

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sb3.json").read_text())
CASES = GOLDEN["cases"]
PPO_CASES = [case for case in CASES if case["kind"] == "ppo"]
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
