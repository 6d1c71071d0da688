"""Training makes the reward go up, and only where there is something to learn from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import lines, small_run

from train import collect, ppo
from train.setup import Run

N_ITERS = 8
OPTIONS: dict[str, Any] = {
    "env__n_envs": 16,
    "env__args__max_episode_length": 6,
    "alg__args": {
        "n_steps": 12,
        "batch_size": 64,
        "n_epochs": 4,
        "learning_rate": 0.01,
        "gamma": 1.0,
        "micro_batch_size": 32,
    },
    "alg__kl_div__coeff": 0.01,
    "train_evaluation": {
        "n_iters": N_ITERS,
        "eval_every": N_ITERS,
        "eval_batch_size": 100,
        "save_every": 0,
        "metrics": [{"id": "reward", "args": {"id": "user_code:small_numbers"}}],
    },
}
SHARE = "rewards/user_code:small_numbers"


def learn(folder: Path, model: Path, **options: Any) -> tuple[Run, list[float]]:
    """A run, and the share of small numbers in its val responses before and after."""
    with small_run(folder, model, **{**OPTIONS, **options}) as run:
        ppo.train(run)
    return run, [row["metrics"][SHARE] for row in lines(run.folder / "val_split_metrics.jsonl")]


@pytest.mark.parametrize("value_model", ["separate", "shared"])
def test_the_reward_goes_up(value_model: str, models: Callable[..., Path], tmp_path: Path) -> None:
    run, (before, after) = learn(tmp_path, models(), alg__policy__args__value_model=value_model)
    assert before < 0.45 and after > 0.85
    rows = lines(run.folder / "metrics.jsonl")
    assert rows[-1]["rollout/reward"] > rows[0]["rollout/reward"] + 0.4
    assert rows[-1]["kl/ref"] > 0.3 and rows[0]["kl/ref"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["policy/entropy"] < rows[0]["policy/entropy"] - 0.5


def test_without_advantages_nothing_is_learnt(
    models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gae = collect.gae

    def without(*args: Any, **kwargs: Any) -> Any:
        advantages, returns = gae(*args, **kwargs)
        return torch.zeros_like(advantages), returns

    monkeypatch.setattr(collect, "gae", without)
    run, (before, after) = learn(tmp_path, models(), alg__policy__args__weight_decay=0.0)
    assert after == before
    policy, critic = (run.ranks.unwrap(run.model).policy.lm, run.ranks.unwrap(run.model).critic)
    reference = dict(run.reference.lm.named_parameters())
    assert all(torch.equal(p, reference[name]) for name, p in policy.named_parameters())
    assert not torch.equal(critic.wte.weight, reference["transformer.wte.weight"])


def test_a_constant_reward_teaches_nothing(models: Callable[..., Path], tmp_path: Path) -> None:
    _, (before, after) = learn(tmp_path, models(), reward_fn={"id": "user_code:one"})
    assert abs(after - before) < 0.15
