"""Learning curves of every algorithm on the two embedded tasks: how reward and KL go with the tokens that are sampled.

    OMP_NUM_THREADS=1 python -m benchmarks.algorithms --jobs 2

numbers: counting upwards, a random GPT-2 of two small layers (made here). reviews: positive film reviews, from the warm
start of the quick start (`make quickstart` makes it). Each run is one of configs/, with another seed; it is not
repeated if it is there already with the same configuration. Writes curves.csv, table.md and a picture per task.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tools.run_files import read_jsonl
from train.config import load_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "algorithms"
NAMES = {
    "ppo": "PPO",
    "nlpo": "NLPO",
    "a2c": "A2C",
    "trpo": "TRPO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce_plus_plus": "REINFORCE++",
}
# Distinguishable without colour vision (Okabe and Ito), and by their lines.
COLORS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#000000")
STYLES = dict(zip(NAMES, zip(COLORS, ("-", "--", "-", "--", "-", "--", ":"), strict=True), strict=True))


@dataclass(frozen=True)
class Task:
    """title and reward's unit for the picture; n_tokens: what every run samples; metric: of the val split."""

    title: str
    unit: str
    n_tokens: int
    metric: str
    text: str


TASKS = {
    "numbers": Task("Counting upwards, from a random model", "rising start, share of 20", 128_000, "reward", "length"),
    "reviews": Task(
        "Positive film reviews, from the warm start",
        *("probability of positive", 30_720, "reward", "diversity_metrics/distinct-2"),
    ),
}


def config_of(task: str, algorithm: str) -> Path:
    if task == "numbers":
        return ROOT / "configs" / "synthetic" / f"increasing_numbers_gpt2_{algorithm}.yml"
    return ROOT / "configs" / "quickstart" / f"{script_of(algorithm)}.yml"


def script_of(algorithm: str) -> str:
    return "grpo" if algorithm in ("rloo", "reinforce_plus_plus") else algorithm


def command(task: str, algorithm: str, seed: int, out: Path) -> list[str]:
    """The run as a command line: its configuration, and as many iterations as the task's tokens allow."""
    config = load_config(["--config", str(config_of(task, algorithm))])
    per_iteration = config.env.n_envs * config.alg.args.n_steps
    options = {
        "alg.args.seed": seed,
        "train_evaluation.n_iters": TASKS[task].n_tokens // per_iteration,
        "train_evaluation.eval_every": 0,
        "train_evaluation.save_every": 0,
        "tracking.output_dir": out,
        "tracking.project_name": task,
        "tracking.experiment_name": f"{algorithm}_{seed}",
        "tracking.trackers": "[]",
    }
    if task == "reviews" and algorithm != script_of(algorithm):
        options |= {"alg.args.advantage_estimator": algorithm, "alg.kl_div.coeff": 0.04}  # in the reward, not the loss
    words = [f"--{name}={value}" for name, value in options.items()]
    script = f"train.{script_of(algorithm)}"
    return [sys.executable, "-m", script, "--config", str(config_of(task, algorithm)), "--overwrite", *words]


def prepare(task: str) -> None:
    """Makes the task's model. Raises SystemExit if the warm start is not there."""
    if task == "numbers" and not (ROOT / "runs/models/numbers").is_dir():
        words = ["--out", "runs/models/numbers", "--family", "gpt2", "--tokenizer", "numbers"]
        subprocess.run([sys.executable, "-m", "tools.make_tiny_model", *words], check=True, cwd=ROOT)
    if task == "reviews" and not (ROOT / "runs/quickstart/supervised/model").is_dir():
        raise SystemExit("reviews need the warm start of the quick start: make quickstart, or its first two steps")


def is_done(folder: Path, words: list[str]) -> bool:
    """Whether `folder` holds a finished run of this command line, with the configuration as it is now."""
    if not (folder / "model" / "README.md").is_file():
        return False
    saved = json.loads((folder / "config.json").read_text())
    return bool(saved == load_config(words[3:]).to_dict())


def run_one(job: tuple[str, str, int], out: Path) -> str | None:
    """Runs a job unless it is done; what it said if it failed."""
    task, algorithm, seed = job
    words = command(task, algorithm, seed, out)
    if is_done(out / task / f"{algorithm}_{seed}", words):
        return None
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    return None if done.returncode == 0 else f"{task} {algorithm} seed {seed}:\n{done.stderr[-2000:]}"


def read_one(job: tuple[str, str, int], out: Path) -> dict[str, Any]:
    """Curves and final numbers of a run."""
    task, algorithm, seed = job
    folder = out / task / f"{algorithm}_{seed}"
    rows, val = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "val_split_metrics.jsonl")
    tokens, curve = 0.0, []
    for row in rows:
        tokens += row["rollout/tokens"]
        curve.append((tokens, row["rollout/reward"], row["kl/ref"]))
    return {
        "curve": curve,
        "before": val[0]["metrics"][TASKS[task].metric],
        "after": val[-1]["metrics"][TASKS[task].metric],
        "text": val[-1]["metrics"].get(TASKS[task].text, float("nan")),
        "kl": statistics.fmean(point[2] for point in curve[-max(1, len(curve) // 10) :]),
        "speed": tokens / sum(map(cpu_seconds, rows)),
    }


def cpu_seconds(row: dict[str, Any]) -> float:
    """Of an iteration without its evaluation, the workers' included."""
    return float(row["perf/seconds_working"] * (row["perf/rank_cpu_cores"] + row["perf/workers_cpu_cores"]))


def bins(curve: list[tuple[float, float, float]], column: int, n: int = 50) -> list[tuple[float, float]]:
    """(tokens, mean) of n equal parts of a curve, so that algorithms with many small rollouts look as smooth."""
    total, parts = curve[-1][0], defaultdict(list)
    for point in curve:
        if point[column] is not None:
            parts[min(n - 1, int((point[0] - 1) / total * n))].append(point)
    return [
        (statistics.fmean(p[0] for p in part), statistics.fmean(p[column] for p in part)) for part in parts.values()
    ]


def draw(task: str, found: dict[tuple[str, str, int], dict[str, Any]], out: Path) -> None:
    """Reward and KL against tokens: a line per algorithm, the mean over its seeds, in a band from the least to the
    largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5), dpi=110)
    units = (f"reward: {TASKS[task].unit}", "KL to the start, nats per token")
    for column, (ax, unit) in enumerate(zip(axes, units, strict=True), 1):
        for algorithm, (color, style) in STYLES.items():
            lines = [bins(r["curve"], column, 25) for job, r in found.items() if job[:2] == (task, algorithm)]
            if not lines:
                continue
            n = min(map(len, lines))
            x = [lines[0][i][0] for i in range(n)]
            ys = [[line[i][1] for line in lines] for i in range(n)]
            ax.plot(x, [statistics.fmean(y) for y in ys], style, color=color, label=NAMES[algorithm], linewidth=1.8)
            ax.fill_between(x, [min(y) for y in ys], [max(y) for y in ys], color=color, alpha=0.12, linewidth=0)
        ax.set_xlabel("sampled tokens")
        ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
        ax.set_ylabel(unit)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.suptitle(TASKS[task].title, fontweight="bold", x=0.06, ha="left")
    figure.tight_layout(w_pad=3)
    figure.savefig(out / f"{task}.png")
    plt.close(figure)


def table(found: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    """Final numbers, mean ± standard deviation over seeds, as Markdown."""
    lines = []
    for task, spec in TASKS.items():
        groups = {a: [r for job, r in found.items() if job[:2] == (task, a)] for a in NAMES}
        if not any(groups.values()):
            continue
        lines += [f"**{spec.title}** ({spec.n_tokens:,} tokens a run)", ""]
        text = spec.text.rpartition("/")[2]
        lines += [f"| | reward before | after | KL at the end | {text} | tokens per CPU-second |", "|---" * 6 + "|"]
        for algorithm, results in groups.items():
            if results:
                columns = [[r[name] for r in results] for name in ("before", "after", "kl", "text")]
                cells = [f"{statistics.fmean(c):.2f} ± {statistics.pstdev(c):.2f}" for c in columns]
                speed = statistics.fmean(r["speed"] for r in results)
                lines.append(f"| {NAMES[algorithm]} | {' | '.join(cells)} | {speed:.0f} |")
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (each on its own core)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "algorithms", help="the runs' folders")
    parser.add_argument("--out", type=Path, default=RESULTS, help="pictures, table and curves")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for task in args.tasks:
        prepare(task)
    jobs = [(task, algorithm, seed) for task in args.tasks for seed in args.seeds for algorithm in args.algorithms]
    with ThreadPoolExecutor(args.jobs) as pool:
        faults = list(tqdm(pool.map(lambda job: run_one(job, args.runs), jobs), total=len(jobs), unit="run"))
    for fault in filter(None, faults):
        print(fault, file=sys.stderr)
    found = {job: read_one(job, args.runs) for job, fault in zip(jobs, faults, strict=True) if fault is None}
    with (args.out / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("task", "algorithm", "seed", "tokens", "reward", "kl"))
        for (task, algorithm, seed), result in found.items():
            for (tokens, reward), (_, kl) in zip(bins(result["curve"], 1), bins(result["curve"], 2), strict=False):
                writer.writerow((task, algorithm, seed, round(tokens), f"{reward:.4f}", f"{kl:.4f}"))
    for task in args.tasks:
        draw(task, found, args.out)
    (args.out / "table.md").write_text(table(found))
    print(table(found))
    if any(faults):
        sys.exit(1)


if __name__ == "__main__":
    main()
