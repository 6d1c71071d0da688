"""What a run writes while it goes: metrics files, trackers, timings, resources, the progress bar, the final table."""

import contextlib
import datetime
import io
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from train.distributed import Ranks

# RL4LMs' names in its two files of training statistics, and ours.
ROLLOUT_INFO = {
    "rollout_info/ep_rew": "rollout/reward",
    "rollout_info/ep_rew_std": "rollout/reward_std",
    "rollout_info/kl_div_mean": "kl/ref",
    "rollout_info/kl_div_mean_std": "kl/ref_std",
    "rollout_info/ep_lens": "rollout/length",
    "rollout_info/ep_lens_std": "rollout/length_std",
    "rollout_info/ep_kl_rew": "kl/episode_reward",
    "rollout_info/ep_kl_rew_std": "kl/episode_reward_std",
    "rollout_info/log_prob": "policy/logprob",
    "rollout_info/log_prob_std": "policy/logprob_std",
    "rollout_info/ref_log_prob": "policy/ref_logprob",
    "rollout_info/ref_log_prob_std": "policy/ref_logprob_std",
    "rollout_info/values": "value/mean",
    "rollout_info/values_std": "value/mean_std",
    "rollout_info/kl_coeff": "kl/coef",
}
TRAINING_INFO = {
    "ppo/entropy_loss": "loss/entropy",
    "ppo/policy_gradient_loss": "loss/policy",
    "ppo/value_loss": "loss/value",
    "ppo/approx_kl": "policy/approx_kl",
    "ppo/explained_variance": "value/explained_variance",
}


class Clock:
    """Seconds per phase of an iteration. On a GPU a phase ends when its work is done, not when it is queued."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.start = device, defaultdict[str, float](float), time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time inside the context to `phase`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """{phase: seconds} and "total" since the last call, which starts the next iteration."""
        now = time.perf_counter()
        taken = {**self.seconds, "total": now - self.start}
        self.seconds.clear()
        self.start = now
        return taken


class Resources:
    """Memory and CPU use of this rank and of its workers; GPU memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.process = device, psutil.Process()
        self.cpu_seconds: dict[int, float] = {}

    def _cpu(self, processes: list[psutil.Process]) -> float:
        used = 0.0
        for process in processes:
            times = process.cpu_times()
            now = times.user + times.system
            used += now - self.cpu_seconds.get(process.pid, 0.0)
            self.cpu_seconds[process.pid] = now
        return used

    def take(self, worker_pids: list[int], seconds: float) -> dict[str, float]:
        """Values at the end of an iteration that took `seconds`; CPU use in cores, memory in GB (10⁹ bytes)."""
        workers = []
        for pid in worker_pids:
            with contextlib.suppress(psutil.Error):
                workers.append(psutil.Process(pid))
        values = {
            "perf/rank_memory_gb": self.process.memory_info().rss / 1e9,
            "perf/rank_cpu_cores": self._cpu([self.process]) / seconds,
            "perf/workers_memory_gb": sum(process.memory_info().rss for process in workers) / 1e9,
            "perf/workers_cpu_cores": self._cpu(workers) / seconds,
        }
        if self.device.type == "cuda":
            values["perf/gpu_allocated_gb"] = torch.cuda.memory_allocated(self.device) / 1e9
            values["perf/gpu_peak_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            torch.cuda.reset_peak_memory_stats(self.device)
        return values


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with NaN and infinity as null: JSON has neither."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Adds one JSON object to a .jsonl file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none if there is no file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def forget_after(folder: Path, iteration: int) -> None:
    """Takes the lines of later iterations out of a run's files, before it resumes from `iteration`."""
    for path in folder.glob("*.jsonl"):
        _keep_lines(path, lambda row: row["iteration"] <= iteration)


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    # A run that was killed may have left half a line at the end.
    rows = [row for line in path.read_text("utf-8").splitlines() if (row := _parsed(line)) and wanted(row)]
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    os.replace(aside, path)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row


class Tracker:
    """Rank 0's files, trackers and progress bar; on other ranks every method does nothing."""

    def __init__(self, folder: Path, ranks: Ranks, *, n_iters: int, done: int = 0) -> None:
        self.folder, self.ranks, self.n_iters, self.done = folder, ranks, n_iters, done
        self.started = time.perf_counter()
        self.first = done
        self.bar = None
        if ranks.is_main and n_iters and sys.stderr.isatty():
            self.bar = tqdm(total=n_iters, initial=done, unit="iteration", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        if self.ranks.is_main:
            if self.bar is not None:
                self.bar.write(text)
            else:
                print(text, flush=True)

    def log_iteration(self, values: Mapping[str, float], iteration: int) -> None:
        """An iteration's statistics: metrics.jsonl (our names), rollout_info.jsonl, training_info.jsonl (RL4LMs')."""
        if not self.ranks.is_main:
            return
        append_line(self.folder / "metrics.jsonl", plain({"iteration": iteration, **values}))
        for file, names in (("rollout_info.jsonl", ROLLOUT_INFO), ("training_info.jsonl", TRAINING_INFO)):
            row = {theirs: values[ours] for theirs, ours in names.items() if ours in values}
            append_line(self.folder / file, plain({"iteration": iteration, **row}))
        self.ranks.accelerator.log(plain(values), step=iteration)
        self._progress(values, iteration)

    def _progress(self, values: Mapping[str, float], iteration: int) -> None:
        shown = {"reward": values["rollout/reward"], "kl": values["kl/ref"], "tokens/s": values["perf/tokens_per_s"]}
        text = {name: f"{value:.0f}" if name == "tokens/s" else f"{value:.3f}" for name, value in shown.items()}
        if self.bar is not None:
            self.bar.set_postfix(text, refresh=False)
            self.bar.update(1)
            return
        per_iteration = (time.perf_counter() - self.started) / (iteration - self.first)
        left = datetime.timedelta(seconds=round(per_iteration * (self.n_iters - iteration)))
        numbers = "  ".join(f"{name} {value}" for name, value in text.items())
        print(f"iteration {iteration}/{self.n_iters}  {numbers}  ETA {left}", flush=True)

    def log_evaluation(
        self,
        split: str,
        metrics: Mapping[str, float],
        rows: list[dict[str, Any]],
        iteration: int,
        n_shown: int = 0,
        epoch: float | None = None,
    ) -> None:
        """{split}_split_metrics.jsonl and epoch_{epoch}_{split}_split_predictions.json, as RL4LMs names them.

        epoch: the iteration, unless it is given. Trackers get the metrics, and the first `n_shown` predictions as text.
        """
        if not self.ranks.is_main:
            return
        epoch = iteration if epoch is None else int(epoch) if epoch == int(epoch) else epoch
        line = {"epoch": epoch, "iteration": iteration, "metrics": plain(metrics)}
        history = self.folder / f"{split}_split_metrics.jsonl"
        if history.exists():  # a run that is resumed after its last iteration measures again
            _keep_lines(history, lambda row: row["iteration"] != iteration)
        append_line(history, line)
        path = self.folder / f"epoch_{epoch}_{split}_split_predictions.json"
        path.write_text(json.dumps([plain(row) for row in rows], ensure_ascii=False, indent=1), "utf-8")
        logged: dict[str, Any] = {f"eval/{split}/{name}": value for name, value in metrics.items()}
        if n_shown:
            shown = (f"{row['prompt_text']} → {row['generated_text']}" for row in rows[:n_shown])
            logged[f"eval/{split}/samples"] = "\n\n".join(shown)
        self.ranks.accelerator.log(plain(logged), step=iteration)

    def close(self) -> None:
        """Ends the progress bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def results_table(folder: Path, split: str = "test") -> str:
    """Metrics of a split, first and last, as a table to print."""
    rows = read_lines(folder / f"{split}_split_metrics.jsonl")
    table = Table(title=f"{split} split of {folder}", title_justify="left")
    for column in ("metric", f"before ({rows[0]['iteration']})", f"after ({rows[-1]['iteration']})"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, after in rows[-1]["metrics"].items():
        before = rows[0]["metrics"].get(name)
        table.add_row(name, *("-" if value is None else f"{value:.4f}" for value in (before, after)))
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
