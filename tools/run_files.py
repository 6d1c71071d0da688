"""Read the files of a run's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Point = tuple[float, float]


def read_jsonl(path: Path) -> list[Row]:
    """Objects of a file, or none if it is missing. A last line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def read_run(folder: Path) -> dict[str, list[Row]]:
    """{"train", "val", "test"}: rows with "iteration" and the values by name."""
    train: dict[int, Row] = {}
    for file in ("rollout_info.jsonl", "metrics.jsonl"):
        for number, row in enumerate(read_jsonl(folder / file), start=1):
            iteration = int(row.get("iteration", number))
            train.setdefault(iteration, {"iteration": iteration}).update(row)
    run = {"train": [train[iteration] for iteration in sorted(train)]}
    for split in ("val", "test"):
        rows = read_jsonl(folder / f"{split}_split_metrics.jsonl")
        run[split] = [
            {**row.get("metrics", {}), "iteration": row.get("iteration", row.get("epoch", 0))} for row in rows
        ]
    return run


def points(rows: Iterable[Row], names: Sequence[str]) -> list[Point]:
    """(iteration, value) of the first name that any row has; values that are no number are left out."""
    rows = list(rows)
    name = next((name for name in names if any(name in row for row in rows)), None)
    return [
        (float(row["iteration"]), float(row[name]))
        for row in rows
        if isinstance(row.get(name or ""), int | float) and not isinstance(row.get(name or ""), bool)
    ]


def read_predictions(folder: Path) -> tuple[str, list[tuple[int, dict[str, Row]]]]:
    """The split (test if there are any, else val) and its predictions by sample id, first and last evaluation."""
    for split in ("test", "val"):
        found = []
        for path in folder.glob(f"epoch_*_{split}_split_predictions.json"):
            if number := re.fullmatch(rf"epoch_(\d+)(?:\.\d+)?_{split}_split_predictions", path.stem):
                found.append((int(number[1]), path))
        if found:
            ends = sorted(found)[:1] + sorted(found)[1:][-1:]
            return split, [
                (epoch, {str(row["sample_id"]): row for row in json.loads(path.read_text(encoding="utf-8"))})
                for epoch, path in ends
            ]
    return "test", []


def pairs(predictions: list[tuple[int, dict[str, Row]]], n: int) -> list[tuple[Row, Row]]:
    """Up to n samples that both evaluations have, spread evenly over the split, as (before, after)."""
    if not predictions:
        return []
    before, after = predictions[0][1], predictions[-1][1]
    shared = [sample for sample in before if sample in after]
    step = max(len(shared) // n, 1)
    return [(before[sample], after[sample]) for sample in shared[::step][:n]]


def describe(folder: Path) -> str:
    """What ran, from the run's config.json: algorithm, model, task, reward, KL coefficient."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""

    def at(*path: str) -> Any:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    parts = {
        "": str(at("alg", "args", "advantage_estimator") or at("alg", "id") or "").replace("_plus_plus", "++").upper(),
        "model ": at("alg", "policy", "args", "model_name") or at("alg", "model_name"),
        "task ": at("datapool", "id"),
        "reward ": at("reward_fn", "id"),
        "KL coefficient ": at("alg", "kl_div", "coeff"),
        "critic's learning rate " if at("alg", "id") == "trpo" else "learning rate ": at(
            "alg", "args", "learning_rate"
        ),
        "seed ": at("alg", "args", "seed"),
    }
    return " · ".join(f"{name}{value}" for name, value in parts.items() if value not in (None, ""))
