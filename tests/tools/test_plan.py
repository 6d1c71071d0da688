"""The planner counts what a run holds: to the byte where the strategy says it, and by parts where ranks share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import command

from algorithms.models import load_actor_critic
from tools.plan import main

Models = Callable[..., Path]


def planned(folder: Path, model: Path, strategy: str, **changes: Any) -> dict[str, float]:
    """{what: bytes} of each GPU in the update."""
    path = folder / f"{strategy}.json"
    arguments = [*command(folder, model, **changes), "--gpus", "2x80GB", "--strategy", strategy, "--json", str(path)]
    assert main(arguments) == 0
    device: dict[str, Any] = json.loads(path.read_text())["devices"][0]
    update: dict[str, float] = device["phases"]["update"]
    return update


def test_weights_and_the_optimizer_s_state_to_the_byte(models: Models, tmp_path: Path) -> None:
    actor_critic = load_actor_critic(str(models()))
    n_policy = sum(p.numel() for p in actor_critic.policy.parameters())
    n_all, n_tensors = sum(p.numel() for p in actor_critic.parameters()), len(list(actor_critic.parameters()))
    whole = planned(tmp_path, models(), "ddp")
    assert whole["weights of the policy"] == whole["weights of the reference"] == 4 * n_policy
    assert whole["weights of the critic"] == 4 * (n_all - n_policy)
    assert whole["optimizer"] == 8 * n_all + 4 * n_tensors  # two moments, and AdamW's counter of each tensor
    shared = planned(tmp_path, models(), "ddp", alg__policy__args__value_model="shared")
    assert shared["weights of the critic"] < 0.05 * whole["weights of the critic"]


def test_ranks_share_what_the_strategy_shares(models: Models, tmp_path: Path) -> None:
    whole, parts = planned(tmp_path, models(), "ddp"), planned(tmp_path, models(), "fsdp2")
    for name in ("weights of the policy", "weights of the reference", "optimizer"):
        assert 0.45 < parts[name] / whole[name] < 0.6, name


def test_what_cannot_be_planned_is_said(models: Models, tmp_path: Path) -> None:
    arguments = command(tmp_path, models())
    for options, message in (
        (["--strategy", "zero4", "--gpus", "2x80GB"], "did you mean 'zero3'?"),
        (["--gpus", "2y80"], "as 8x80GB"),
        (["--strategy", "tensor_parallel", "--gpus", "2x80GB"], "has no plan for gpt2"),
    ):
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            main([*arguments, *options])
    assert main([*arguments, "--gpus", "2x0.1GB"]) == 1  # does not fit
