"""What is saved with a run, and what may differ when it is resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.config import FREE_ON_RESUME, Config, load_config

RL4LMS = Path(__file__).parent / "rl4lms"
PPO = str(RL4LMS / "causal_ppo.yml")


def load(*overrides: str) -> Config:
    return load_config(["--config", PPO, *overrides])


@pytest.mark.parametrize("name", ["causal_ppo.yml", "seq2seq_ppo.yml", "seq2seq_supervised.yml"])
def test_to_dict_is_plain_and_loads_again(name: str, tmp_path: Path) -> None:
    config = load_config(["--config", str(RL4LMS / name), "--datapool={id: a, args: {x: [1, 2]}}", "--overwrite"])
    saved = json.loads(json.dumps(config.to_dict()))
    assert "run" not in saved
    (tmp_path / "saved.yml").write_text(yaml.safe_dump(saved))
    again = load_config(["--config", str(tmp_path / "saved.yml")])
    assert again.to_dict() == config.to_dict()
    assert config.differences(saved) == []


def test_differences_name_the_keys_that_matter() -> None:
    changes = ["--alg.args.gamma=0.9", "--datapool.args.prompt=x", "--tokenizer.max_length=7", "--reward_fn.id=y"]
    free = ["--train_evaluation.n_iters=9", "--env.n_workers=1", "--tracking.project_name=x", "--alg.args.verbose=0"]
    config = load(*changes, *free)
    expected = ["alg.args.gamma", "datapool.args.prompt", "reward_fn.id", "tokenizer.max_length"]
    assert config.differences(load().to_dict()) == expected
    assert load().differences(config.to_dict()) == expected


def test_the_length_of_a_run_matters_where_the_learning_rate_depends_on_it() -> None:
    short, long = (
        load("--alg.args.lr_schedule=linear"),
        load("--alg.args.lr_schedule=linear", "--train_evaluation.n_iters=9"),
    )
    assert long.differences(short.to_dict()) == ["train_evaluation.n_iters"]


def test_keys_that_are_free_on_resume_exist() -> None:
    tree: Any = load().to_dict()
    for path in FREE_ON_RESUME:
        node = tree
        for key in path.rstrip(".").split("."):
            assert key in node, path
            node = node[key]
