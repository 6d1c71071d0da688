"""Every algorithm, causal and sequence-to-sequence, makes the reward go up; none of them learns from nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from algorithm_runs import ALGORITHMS, KINDS, options_of, script_of
from helpers import flat, lines, small_run

SHARE = "rewards/user_code:small_numbers"
SHARED: dict[str, Any] = {"n_steps": 12, "gamma": 1.0, "micro_batch_size": 64}
CLIPPED = {**SHARED, "batch_size": 64, "n_epochs": 4, "learning_rate": 0.01}
# Arguments, iterations: A2C and TRPO make one step where the others make twelve.
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "ppo": (CLIPPED, 8),
    "nlpo": (CLIPPED, 8),
    "a2c": ({**SHARED, "learning_rate": 0.005, "normalize_advantage": True}, 30),
    "trpo": ({**SHARED, "batch_size": 64, "learning_rate": 0.01, "target_kl": 0.05, "n_critic_updates": 4}, 14),
    "grpo": ({**CLIPPED, "num_generations": 4}, 8),
    "rloo": ({**CLIPPED, "num_generations": 4}, 8),
    "reinforce_plus_plus": (CLIPPED, 8),
}


def learn(algorithm: str, family: str, model: Path, folder: Path, **changes: Any) -> tuple[float, float, float]:
    """(share of small numbers in val responses before, after, how far the policy's weights moved)."""
    args, n_iters = SETTINGS[algorithm]
    options = {
        **options_of(algorithm, family, **args),
        "env__n_envs": 16,
        "env__args__max_episode_length": 6,
        "alg__kl_div__coeff": 0.01,
        "train_evaluation": {
            "n_iters": n_iters,
            "eval_every": 0,
            "eval_batch_size": 100,
            "save_every": 0,
            "metrics": [{"id": "reward", "args": {"id": "user_code:small_numbers"}}],
        },
        **changes,
    }
    script = script_of(algorithm)
    with small_run(folder, model, **options) as run:
        policy = run.ranks.unwrap(run.model).policy
        before = flat(policy)
        script.train(run)
        moved = float((flat(policy) - before).norm())
    first, last = (row["metrics"][SHARE] for row in lines(run.folder / "val_split_metrics.jsonl"))
    return first, last, moved


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_reward_goes_up(algorithm: str, family: str, models: Callable[..., Path], tmp_path: Path) -> None:
    before, after, _ = learn(algorithm, family, models(family), tmp_path)
    assert before < 0.4 and after > 0.75


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_constant_reward_teaches_nothing(
    algorithm: str, family: str, models: Callable[..., Path], tmp_path: Path
) -> None:
    """Without a critic, which has to learn the constant first, and without a KL in the loss, whose rounding Adam makes
    much of, not a bit of the policy changes."""
    before, after, moved = learn(algorithm, family, models(family), tmp_path, reward_fn={"id": "user_code:one"})
    assert after < 0.5
    assert (moved == 0 and after == before) == (algorithm in ("rloo", "reinforce_plus_plus"))
