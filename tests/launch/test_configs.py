"""Every file in configs/synthetic runs: an iteration of it, few environments, the model of its head comment."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from algorithm_runs import script_of
from helpers import ROOT, lines

from tools.make_tiny_model import main as make_tiny_model

FILES = sorted((ROOT / "configs" / "synthetic").glob("*.yml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_runs_with_the_model_that_its_comment_makes(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    config = yaml.safe_load(text)
    model = config["tokenizer"]["model_name"]
    (made,) = re.findall(r"^#   python -m tools\.make_tiny_model (.*)$", text, re.MULTILINE)
    assert f"--out {model} " in made and config["alg"]["policy"]["args"]["model_name"] == model
    make_tiny_model(shlex.split(made.replace(f"--out {model} ", f"--out {tmp_path / 'model'} ")))
    (command,) = re.findall(r"^#   python -m train\.(\w+) --config (\S+)$", text, re.MULTILINE)
    algorithm = config["alg"]["id"]
    assert command == (algorithm, str(path.relative_to(ROOT)))
    options = {
        "tokenizer.model_name": tmp_path / "model",
        "alg.policy.args.model_name": tmp_path / "model",
        "env.n_envs": 8,
        "env.n_workers": 1,
        "alg.args.n_steps": 30,
        "train_evaluation.n_iters": 1,
        "train_evaluation.max_eval_samples": 4,
        "tracking.output_dir": tmp_path,
        "tracking.trackers": "[]",
    }
    if algorithm == "grpo":
        options["alg.args.num_generations"] = 8
    script_of(algorithm).main(["--config", str(path), *(f"--{name}={value}" for name, value in options.items())])
    where = config["tracking"]
    (row,) = lines(tmp_path / where["project_name"] / where["experiment_name"] / "metrics.jsonl")
    assert row["rollout/tokens"] == 240 and row["policy/entropy"] > 0
