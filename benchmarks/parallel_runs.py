"""Runs the cases of benchmarks/parallel_strategies.py, one at a time, and reads what they measured."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.parallel_cases import ROOT, SHAPES, STRATEGIES, Case, command
from tools.run_files import read_jsonl

PHASES = ("generate", "env", "reward", "score", "update", "wait")
Row = dict[str, Any]


class Watch:
    """What the metrics do not tell, from the first iteration on: the most memory (RSS, bytes) of each rank below a
    launcher, by rank, and how many of the machine's cores were busy."""

    def __init__(self, launcher: int, n_ranks: int, metrics: Path) -> None:
        self.launcher, self.n_ranks, self.metrics = psutil.Process(launcher), n_ranks, metrics
        self.ranks: dict[int, psutil.Process] = {}
        self.peaks: dict[int, int] = {}
        self.busy: list[tuple[float, float]] = []  # (time, CPU-seconds that the machine has worked until then)

    @property
    def busy_cores(self) -> float:
        """Mean over the time that was watched."""
        if len(self.busy) < 2:
            return 0.0
        (start, before), (end, after) = self.busy[0], self.busy[-1]
        return (after - before) / (end - start)

    def look(self) -> None:
        """Takes one sample."""
        with contextlib.suppress(psutil.Error):
            if len(self.ranks) < self.n_ranks:
                self._find()
            if self.metrics.exists() and self.metrics.stat().st_size:
                used = psutil.cpu_times()
                self.busy = [*self.busy[:1], (time.perf_counter(), used.user + used.nice + used.system)]
                for rank, process in self.ranks.items():
                    self.peaks[rank] = max(self.peaks.get(rank, 0), process.memory_info().rss)

    def _find(self) -> None:
        for process in self.launcher.children(recursive=True):
            words = process.cmdline()
            if "train/ppo.py" in words and "launch" not in words:
                self.ranks[int(process.environ().get("RANK", 0))] = process


@contextlib.contextmanager
def watching(what: Watch, every: float = 0.2) -> Iterator[None]:
    """Samples in a thread while the context lasts."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every):
            what.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def environment(case: Case, gpu: bool) -> dict[str, str]:
    """Of the launch. With ACCELERATE_USE_CPU accelerate would run DDP instead of DeepSpeed; without, DDP on CPUs would
    be several runs that do not know of each other."""
    env = {**os.environ, "OMP_NUM_THREADS": str(case.threads), "TOKENIZERS_PARALLELISM": "false"}
    env |= {"TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": str(ROOT)}
    if case.model in SHAPES:
        env["HF_HUB_OFFLINE"] = "1"
    env.pop("ACCELERATE_USE_CPU", None)
    if not gpu and not STRATEGIES[case.strategy].file.startswith("zero"):
        env["ACCELERATE_USE_CPU"] = "true"
    return env


def launch(case: Case, folder: Path, *, gpu: bool, options: Sequence[str], timeout: float) -> tuple[str | None, Watch]:
    """Runs a case: (why it failed, or None; what was seen). Whatever was started is ended."""
    words = command(case, folder, gpu=gpu, options=options)
    log = folder / "cases" / f"{case.name}.log"
    metrics = folder / "cases" / case.name / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # of a run before
    with log.open("w") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(case, gpu), stdout=file, stderr=file, start_new_session=True
        )
        watch = Watch(process.pid, case.processes, metrics)
        try:
            with watching(watch):
                process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:.0f} s", watch
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return (None if process.returncode == 0 else reason(log.read_text(errors="replace"))), watch


def reason(log: str) -> str:
    """The line of a log that says best why a run failed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b(?!.*ChildFailed)", line)]
    return next(iter([*ours, *raised, *lines[-1:], "no message"])).removeprefix("error: ")[:300]


def measured(rows: Sequence[Row]) -> Row:
    """Medians over the iterations after the first, which warms up.

    seconds_{phase}: means over ranks; "other" is what lies between the phases. scatter: of an iteration's seconds,
    (largest - smallest) / median.
    """
    later = rows[1:]
    middle = {name: statistics.median(row[name] for row in later) for name in later[0] if name.startswith("perf/")}
    seconds = [row["perf/seconds_working"] for row in later]
    working, tokens = middle["perf/seconds_working"], later[0]["rollout/tokens"]
    result = {f"seconds_{phase}": middle[f"perf/seconds_{phase}"] for phase in PHASES}
    result["seconds_other"] = max(0.0, working - sum(result.values()))
    result |= {f"tokens_per_s_{phase}": tokens / max(result[f"seconds_{phase}"], 1e-9) for phase in PHASES[:-1]}
    result |= {
        "tokens": tokens,
        "tokens_per_s": tokens / working,
        "seconds": working,
        "seconds_checkpoint": middle["perf/seconds_checkpoint"],
        "seconds_wait_max": middle["perf/seconds_wait_max"],
        "cores_per_rank": middle["perf/rank_cpu_cores"] + middle["perf/workers_cpu_cores"],
        "workers_memory_gb": middle["perf/workers_memory_gb"],
        "scatter": (max(seconds) - min(seconds)) / working,
    }
    gpu = {name.removeprefix("perf/"): value for name, value in middle.items() if name.startswith("perf/gpu_peak")}
    return result | gpu


def run_once(case: Case, folder: Path, *, gpu: bool, options: Sequence[str], timeout: float) -> Row:
    """A case as a row: its settings, and its numbers or the reason why there are none."""
    row: Row = {**asdict(case), "gpu": gpu, "options": list(options)}
    try:
        problem, watch = launch(case, folder, gpu=gpu, options=options, timeout=timeout)
        rows = read_jsonl(folder / "cases" / case.name / "metrics.jsonl")
        if problem is None and len(rows) < 2:
            problem = "fewer than two iterations"
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        return {**row, "failed": problem}
    numbers = measured(rows)
    gigabytes = [watch.peaks[rank] / 1e9 for rank in sorted(watch.peaks)]
    seen = {
        "memory_gb": max(gigabytes, default=None),
        "memory_gb_by_rank": gigabytes,
        "others_cores": max(0.0, watch.busy_cores - case.processes * numbers["cores_per_rank"]),
    }
    return {**row, "failed": None, **numbers, **seen}


def run_case(
    case: Case,
    folder: Path,
    *,
    gpu: bool = False,
    options: Sequence[str] = (),
    timeout: float = 300,
    most_scatter: float = 0.25,
    again: bool = False,
) -> Row:
    """The row of a case that was finished before in `folder`, or of a new run.

    A run whose iterations scatter by more than most_scatter is done once more, and the calmer one counts.
    """
    path = folder / "cases" / f"{case.name}.row.json"
    settings = {**asdict(case), "gpu": gpu, "options": list(options)}
    if path.is_file() and not again:
        row: Row = json.loads(path.read_text())
        if settings.items() <= row.items():
            return row
    row = run_once(case, folder, gpu=gpu, options=options, timeout=timeout)
    if row["failed"] is None and row["scatter"] > most_scatter:
        second = run_once(case, folder, gpu=gpu, options=options, timeout=timeout)
        row = min((r for r in (row, second) if r["failed"] is None), key=lambda r: r["scatter"])
    if row["failed"] is None:
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(row, indent=1))
        os.replace(aside, path)
    return row
