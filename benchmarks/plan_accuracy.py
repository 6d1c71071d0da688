"""How well tools.plan foresees the memory of runs: planned and measured peaks of each rank, on CPUs.

    OMP_NUM_THREADS=1 python -m benchmarks.plan_accuracy          # two cores: about an hour and a half
    OMP_NUM_THREADS=1 python -m benchmarks.plan_accuracy --only ddp zero

Two iterations of full-length episodes (16 of 32 + 96 tokens) with random models of 73 to 121 MB of weights, of whose
ranks the largest counts. Bytes above what a rank has after its imports. "in use": measured with an allocator that
returns what is freed; "process": resident memory of a run as it is, the holes between glibc's blocks included. What was
measured before in --runs is not measured again. Writes plan_accuracy.csv and plan_accuracy.json.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.plan_runs import ROOT, Case, arguments, measure
from tools.plan_result import HOLES, LIBRARIES

_ARGS, _POLICY = "alg.args.", "alg.policy.args."
FEW = {_ARGS + "micro_batch_size": 4}
RECOMPUTED = {_POLICY + "gradient_checkpointing": True}
NLPO = {_POLICY + "mask_type": "learned_top_p", _POLICY + "top_mask": 0.9}
TRPO = {**FEW, _ARGS + "cg_max_steps": 2, _ARGS + "line_search_max_iter": 2, _ARGS + "n_critic_updates": 1}
CASES = (
    Case("gpt2"),
    Case("gpt2", keys=FEW),
    Case("gpt2", keys={_POLICY + "value_model": "shared"}),
    Case("gpt2", keys=RECOMPUTED),
    Case("gpt2", keys={**RECOMPUTED, **FEW}),
    Case("gpt2", keys={_POLICY + "lora": {"r": 16}}),
    Case("gpt2", keys={_POLICY + "optimizer_class": "SGD", **FEW}),
    Case("llama"),
    Case("llama", keys=FEW),
    Case("t5"),
    Case("t5", keys=FEW),
    Case("gpt2", algorithm="grpo"),
    Case("gpt2", algorithm="nlpo", keys=NLPO),
    Case("gpt2", algorithm="a2c", keys={_ARGS + "micro_batch_size": 8}),
    Case("gpt2", algorithm="trpo", keys=TRPO),
    Case("gpt2", "ddp"),
    Case("gpt2", "ddp", keys=FEW),
    Case("gpt2", "zero1"),
    Case("gpt2", "zero2"),
    Case("gpt2", "zero3"),
    Case("gpt2", "zero3", keys=FEW),
    Case("gpt2", "fsdp2"),
    Case("llama", "tensor_parallel"),
)
Row = dict[str, Any]


def planned(case: Case, folder: Path, shape: tuple[int, int, int] | None = None) -> tuple[float, float]:
    """(bytes in use, bytes of the process) that the planner foresees for a rank, above its imports."""
    out = folder / "plan.json"
    words = [*arguments(case, folder, shape), "--gpus", "cpu", "--strategy", case.strategy, "--json", str(out)]
    if case.processes > 1:
        words += ["--num_processes", str(case.processes)]
    subprocess.run([sys.executable, "-m", "tools.plan", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    device = json.loads(out.read_text())["devices"][0]
    process = device["peak"] - device["beside"][LIBRARIES]
    return process - device["beside"].get(HOLES, 0.0), process


def run(case: Case, folder: Path) -> Row:
    """Plan and measurements of a case. What was measured before is read."""
    known = folder / "measured.jsonl"
    rows = [json.loads(line) for line in known.read_text().splitlines()] if known.exists() else []
    peaks = {row["allocator"]: max(row["peaks"]) for row in rows if row["name"] == case.name}
    for allocator in ("returning", "keeping"):
        if allocator not in peaks:
            found = measure(case, folder, returning=allocator == "returning")
            with known.open("a") as file:
                file.write(json.dumps({"name": case.name, "allocator": allocator, "peaks": found}) + "\n")
            peaks[allocator] = max(found)
    in_use, process = planned(case, folder)
    return {
        "name": case.name,
        "ranks": case.processes,
        "in_use_planned": in_use,
        "in_use_measured": peaks["returning"],
        "in_use_error": in_use / peaks["returning"] - 1,
        "process_planned": process,
        "process_measured": peaks["keeping"],
        "process_error": process / peaks["keeping"] - 1,
    }


def table(rows: Sequence[Row]) -> Table:
    """Megabytes and errors."""
    shown = Table(title="peak of a rank above its imports, MB: planned / measured", title_justify="left")
    for column in ("run", "in use", "error", "process", "error"):
        shown.add_column(column, justify="left" if column == "run" else "right")
    for row in rows:
        cells = []
        for kind in ("in_use", "process"):
            cells.append(f"{row[f'{kind}_planned'] / 1e6:,.0f} / {row[f'{kind}_measured'] / 1e6:,.0f}")
            cells.append(f"{row[f'{kind}_error']:+.1%}")
        shown.add_row(row["name"], *cells)
    return shown


def main() -> None:
    """Runs the cases, prints the table, writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of the cases to run")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/plan_accuracy", help="models, and what was measured")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="where the numbers go")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if not args.only or any(part in case.name for part in args.only)]
    rows = [run(case, args.runs) for case in tqdm(cases, unit="case")]
    Console(width=120).print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "plan_accuracy.json").write_text(json.dumps(rows, indent=1) + "\n")
    with (args.out / "plan_accuracy.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
