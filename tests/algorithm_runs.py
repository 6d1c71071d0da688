"""Every algorithm with every kind of model, as small runs: which script, and which configuration."""

import importlib
from types import ModuleType
from typing import Any

ROLLOUT = {"n_steps": 12, "learning_rate": 0.003, "micro_batch_size": 4}
CLIPPED = {**ROLLOUT, "batch_size": 24, "n_epochs": 2}
MASK = {"mask_type": "learned_top_p", "top_mask": 0.9, "target_update_iterations": 2}
_ARGS: dict[str, dict[str, Any]] = {
    "ppo": CLIPPED,
    "nlpo": CLIPPED,
    "a2c": ROLLOUT,
    "trpo": {**ROLLOUT, "batch_size": 24, "n_critic_updates": 2},
    "grpo": {**CLIPPED, "num_generations": 2},
    "rloo": {**CLIPPED, "num_generations": 2, "advantage_estimator": "rloo"},
    "reinforce_plus_plus": {**CLIPPED, "num_generations": 1, "advantage_estimator": "reinforce_plus_plus"},
}
ALGORITHMS = list(_ARGS)
KINDS = ["gpt2", "t5"]


def script_of(algorithm: str) -> ModuleType:
    """The training script of an algorithm."""
    return importlib.import_module(f"train.{algorithm if algorithm in ('ppo', 'nlpo', 'a2c', 'trpo') else 'grpo'}")


def options_of(algorithm: str, family: str, **args: Any) -> dict[str, Any]:
    """Changes that make the base of `helpers.command` a run of the algorithm; `args` go to alg.args."""
    kind = "causal" if family in ("gpt2", "llama", "qwen2") else "seq2seq"
    masked = algorithm == "nlpo"
    options = {
        "alg__id": script_of(algorithm).__name__.removeprefix("train."),
        "alg__args": {**_ARGS[algorithm], **args},
        "alg__policy__id": f"{'maskable_' if masked else ''}{kind}_lm_actor_critic_policy",
    }
    masks = {f"alg__policy__args__{name}": value for name, value in MASK.items()} if masked else {}
    return {**options, **masks}


def collect(script: ModuleType, run: Any, iteration: int) -> Any:
    """A rollout with the script's own way from rewards to advantages."""
    credit = [script.group_credit] if hasattr(script, "group_credit") else []
    return script.collect(run, iteration, *credit)
