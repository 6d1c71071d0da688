"""Tables, files and pictures of what benchmarks/parallel_strategies.py measured."""

import csv
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.algorithms import COLORS
from benchmarks.parallel_cases import Case, Study
from benchmarks.parallel_runs import PHASES, Row

AXES = [f.name for f in fields(Case)]
WORDS = {"n_envs": "envs", "accumulation": "micro-batches", "response": "response tokens"}
SHADES = dict(
    zip((*PHASES, "other"), (*COLORS[:2], COLORS[3], COLORS[4], COLORS[2], COLORS[6], "#bbbbbb"), strict=True)
)


def efficiency(row: Row, rows: Mapping[Case, Row]) -> float | None:
    """Tokens/s over those of as many single processes with the same work each; None if that was not measured."""
    base = rows.get(Case(**{name: row[name] for name in AXES}).baseline)
    if row["strategy"] == "single" or not base or base["failed"] or row["failed"]:
        return None
    return float(row["tokens_per_s"] / (row["ranks"] * base["tokens_per_s"]))


def number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "tokens/s": lambda r: number(r["tokens_per_s"]),
    "efficiency": lambda r: "" if r["efficiency"] is None else f"{r['efficiency']:.0%}",
    **{phase: lambda r, phase=phase: number(r[f"tokens_per_s_{phase}"]) for phase in PHASES[:-1]},
    "checkpoint s": lambda r: number(r["seconds_checkpoint"], 2),
    "waiting s": lambda r: f"{r['seconds_wait']:.2f} / {r['seconds_wait_max']:.2f}" if r["ranks"] > 1 else "",
    "memory GB": lambda r: number(r.get("gpu_peak_gb", r["memory_gb"]), 2),
    "others' cores": lambda r: number(r["others_cores"], 1),
    "scatter": lambda r: f"{r['scatter']:.0%}",
}


def varying(cases: Sequence[Case]) -> list[str]:
    """The axes in which the cases differ, and always the strategy."""
    axes = [name for name in AXES if len({getattr(case, name) for case in cases}) > 1]
    return axes if "strategy" in axes else ["strategy", *axes]


def table(study: Study, rows: Mapping[Case, Row]) -> str:
    """A study as Markdown, aligned to be read as it is. Columns of phases are tokens/s."""
    axes = varying(study.cases)
    lines = [[WORDS.get(name, name) for name in axes] + list(COLUMNS)]
    lines.append(["---"] + ["--:"] * (len(lines[0]) - 1))
    for case in study.cases:
        if (row := rows.get(case)) is None:
            continue
        shown = [str(getattr(case, name)).replace("True", "yes").replace("False", "no") for name in axes]
        if row["failed"]:
            lines.append([*shown, f"failed: {row['failed'].replace('|', '/')}"] + [""] * (len(COLUMNS) - 1))
        else:
            lines.append(shown + [show(row) for show in COLUMNS.values()])
    widths = [
        max(len(line[i]) for line in lines if not line[len(axes)].startswith("failed")) for i in range(len(lines[0]))
    ]
    text = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([f"**{study.title}**", "", *text, ""])


def write(studies: Mapping[str, Study], rows: Mapping[Case, Row], options: Mapping[str, Any], out: Path) -> str:
    """All files of the result in `out`: table.md, results.csv, results.json, a picture per study. Returns the table."""
    out.mkdir(parents=True, exist_ok=True)
    for row in rows.values():
        row["efficiency"] = efficiency(row, rows)
    text = "\n".join(table(study, rows) for study in studies.values())
    (out / "table.md").write_text(text)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows.values()
        )
    result = {"settings": dict(options), "system": system(), "rows": list(rows.values())}
    (out / "results.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    for name, study in studies.items():
        draw(study, rows, out / f"{name}.png")
    return text


def system() -> dict[str, Any]:
    """What it was measured on."""
    libraries = {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}
    return {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(), **libraries}


def draw(study: Study, rows: Mapping[Case, Row], path: Path) -> None:
    """Time per token by phase, and memory, a bar per case; cases that failed are left out."""
    shown = [(case, rows[case]) for case in study.cases if case in rows and not rows[case]["failed"]]
    if not shown:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, memory) = plt.subplots(
        *(1, 2), figsize=(13, 1.9 + 0.36 * len(shown)), dpi=110, sharey=True, width_ratios=(3, 1)
    )
    places = range(len(shown))
    left = [0.0] * len(shown)
    for phase, shade in SHADES.items():
        widths = [1000 * row[f"seconds_{phase}"] / row["tokens"] for _, row in shown]
        times.barh(places, widths, left=left, color=shade, label=phase, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, end, (_, row) in zip(places, left, shown, strict=True):
        share = "" if row["efficiency"] is None else f", {row['efficiency']:.0%}"
        times.text(end, place, f"  {row['tokens_per_s']:,.0f} tokens/s{share}", va="center", fontsize=9)
    used = [row.get("gpu_peak_gb", row["memory_gb"]) or 0.0 for _, row in shown]
    memory.barh(places, used, color="#777777", height=0.7)
    for place, gigabytes in zip(places, used, strict=True):
        memory.text(gigabytes, place, f"  {gigabytes:.2f}", va="center", fontsize=9)
    axes = varying([case for case, _ in shown])
    times.set_yticks(places, [label(case, axes) for case, _ in shown])
    times.invert_yaxis()
    times.set_xlabel("milliseconds per token of all ranks (%: efficiency against one process)")
    memory.set_xlabel("GB, the rank with most")
    times.set_xlim(0, 1.3 * max(left))
    memory.set_xlim(0, 1.3 * max(used) or 1)
    for ax in (times, memory):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", alpha=0.25)
        ax.set_axisbelow(True)
    figure.suptitle(study.title, fontweight="bold", x=0.02, ha="left")
    figure.legend(*times.get_legend_handles_labels(), ncols=len(SHADES), frameon=False, loc="lower center")
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1))
    figure.savefig(path)
    plt.close(figure)


def label(case: Case, axes: Sequence[str]) -> str:
    """A case's name beside its bar."""
    words = [case.strategy.replace("_", " ")]
    for name in axes:
        if name != "strategy":
            value, word = getattr(case, name), WORDS.get(name, name)
            words.append(f"{value} {word[:-1] if value == 1 and word.endswith('s') else word}")
    return ", ".join(words)
