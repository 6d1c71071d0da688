"""The end of a run: the trained model as others load it, its card, and the table of results."""

import os
import shlex
import sys
from pathlib import Path

from algorithms import adapters
from train import tracking
from train.config import Config
from train.launching import launcher
from train.setup import Run


def save_model(run: Run) -> None:
    """Saves model, tokenizer and card into the run's folder `model`, and prints the results before and after."""
    policy, lora = run.ranks.unwrap(run.model).policy, run.config.alg.policy.args.lora
    state = adapters.lm_state(policy, run.ranks.strategy.whole)
    if run.ranks.is_main:
        target = run.folder / "model"
        save = adapters.save_merged if lora and lora.save_merged else adapters.save_pretrained
        save(policy, target, state)
        run.tokenizer.save_pretrained(target)
        table = tracking.results_table(run.folder)
        run.tracker.close()
        (target / "README.md").write_text(model_card(run, table), "utf-8")
        run.tracker.say(f"{table}\nmodel: {target}\nmetrics: {run.folder / 'metrics.jsonl'}")
    run.ranks.barrier()


def model_card(run: Run, table: str) -> str:
    """What was trained, how to repeat it, and what came out."""
    config, policy = run.config, run.config.alg.policy.args
    is_adapter = policy.lora is not None and not policy.lora.save_merged
    tokens = config.alg.args.n_steps * config.env.n_envs * run.ranks.world_size
    return f"""---
base_model: {adapters.base_of(policy.model_name)}
library_name: {"peft" if is_adapter else "transformers"}
tags: [reinforcement-learning, rl4lms-scale, {config.alg.id}]
---
# {config.tracking.experiment_name}

`{policy.model_name}` trained with {algorithm_name(config)} for {run.state.iteration} iterations of \
{tokens} tokens on the task `{config.datapool.id}` with the \
reward `{config.reward_fn.id}` (seed {config.alg.args.seed}, {run.ranks.world_size} process(es)).

Command, in the folder {Path.cwd()}:

    {command(config.alg.id)}

The full configuration is in the run's config.json.

```
{table.strip()}
```
"""


def algorithm_name(config: Config) -> str:
    """As people call it: RLOO and REINFORCE++ are estimators of the script for GRPO."""
    estimator = getattr(config.alg.args, "advantage_estimator", config.alg.id)
    return str(estimator).replace("_plus_plus", "++").upper()


def command(script: str) -> str:
    """The command that repeats the run from its start, to paste into a shell."""
    words = launcher() or ["python", "-m", f"train.{script}", *sys.argv[1:]]
    kept: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        is_value = before == "--resume" and not word.startswith("--")
        if not word.startswith("--resume") and not is_value:
            kept.append(word)
    variable = "ACCELERATE_USE_CPU=true " if os.environ.get("ACCELERATE_USE_CPU") and kept[0] == "accelerate" else ""
    return variable + shlex.join(kept)
