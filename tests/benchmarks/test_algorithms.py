"""The comparison of the algorithms: its commands fit the configurations, its numbers and pictures the runs."""

import json
from pathlib import Path

import pytest

from benchmarks.algorithms import NAMES, TASKS, bins, command, draw, is_done, read_one, table
from train.config import load_config
from train.tracking import append_line

JOBS = [("numbers", "ppo", 0), ("numbers", "ppo", 1), ("numbers", "rloo", 0)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("algorithm", NAMES)
def test_commands_are_those_of_runs_with_the_task_s_tokens(task: str, algorithm: str, tmp_path: Path) -> None:
    words = command(task, algorithm, 5, tmp_path)
    config = load_config(words[3:])
    assert words[2] == f"train.{config.alg.id}" and config.alg.args.seed == 5
    assert getattr(config.alg.args, "advantage_estimator", algorithm) == algorithm
    per_iteration = config.env.n_envs * config.alg.args.n_steps
    assert config.train_evaluation.n_iters * per_iteration == TASKS[task].n_tokens
    assert config.tracking.experiment_name == f"{algorithm}_5" and config.tracking.output_dir == str(tmp_path)


def test_a_run_is_done_only_with_its_configuration(tmp_path: Path) -> None:
    words = command("numbers", "a2c", 0, tmp_path)
    assert not is_done(tmp_path, words)
    (tmp_path / "config.json").write_text(json.dumps(load_config(words[3:]).to_dict()))
    assert not is_done(tmp_path, words)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("written at the end")
    assert is_done(tmp_path, words)
    assert not is_done(tmp_path, [*words, "--alg.args.ent_coef=0.5"])


def make_run(folder: Path, start: float, iterations: int = 100) -> None:
    folder.mkdir(parents=True)
    for i in range(iterations):
        row = {"rollout/tokens": 10.0, "rollout/reward": start + i / iterations, "kl/ref": i / 10}
        row |= {"perf/seconds_working": 0.5, "perf/rank_cpu_cores": 0.75, "perf/workers_cpu_cores": 0.25}
        append_line(folder / "metrics.jsonl", {"iteration": i + 1, **row})
    for i, reward in ((0, start), (iterations, start + 1)):
        append_line(folder / "val_split_metrics.jsonl", {"iteration": i, "metrics": {"reward": reward, "length": 20}})


def test_numbers_and_picture(tmp_path: Path) -> None:
    for (task, algorithm, seed), start in zip(JOBS, (0.0, 0.2, 0.1), strict=True):
        make_run(tmp_path / task / f"{algorithm}_{seed}", start)
    found = {job: read_one(job, tmp_path) for job in JOBS}
    assert found[JOBS[1]]["before"] == 0.2 and found[JOBS[1]]["after"] == 1.2
    assert found[JOBS[0]]["kl"] == pytest.approx(sum(range(90, 100)) / 100)  # of the last tenth
    points = bins(found[JOBS[0]]["curve"], 1)
    assert len(points) == 50 and points[0] == (15.0, pytest.approx(0.005)) and points[-1][0] == 995.0
    text = table(found)
    assert "| PPO | 0.10 ± 0.10 | 1.10 ± 0.10 | 9.45 ± 0.00 | 20.00 ± 0.00 | 20 |" in text and "| RLOO |" in text
    assert "NLPO" not in text and "film reviews" not in text
    draw("numbers", found, tmp_path)
    assert (tmp_path / "numbers.png").stat().st_size > 10_000
