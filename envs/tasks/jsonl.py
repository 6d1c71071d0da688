"""Prompts and references from local JSON Lines files: the way to bring data without writing a task.

One object per line:

    {"prompt": "…", "references": ["…", "…"], "id": "…", "meta": {…}}

Only `prompt` is required. `reference` with one string may stand for `references`; `meta` is for rewards and metrics.
A causal model continues the prompt, so a reference is what should follow the prompt and does not repeat it.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.samples import Sample

KEYS = ("prompt", "references", "reference", "meta", "id")


def jsonl(
    split: str, *, path: str | os.PathLike[str] | None = None, data_files: Mapping[str, str] | None = None
) -> list[Sample]:
    """The samples of {path}/{split}.jsonl or data_files[split], in the order of the file.

    Raises ValueError: no such file, no samples in it, or a line that is not a sample (file and line are named).
    """
    file = _file(split, path, data_files)
    samples: list[Sample] = []
    first_line: dict[str, int] = {}
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                sample = parse(line, default_id=f"{split}_{len(samples)}")
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
            if (first := first_line.setdefault(sample.sample_id, number)) != number:
                raise ValueError(f"{file}, line {number}: id {sample.sample_id!r} is already that of line {first}")
            samples.append(sample)
    if not samples:
        raise ValueError(f"datapool jsonl: {file} has no samples, so the {split} split is empty")
    return samples


def parse(line: str, *, default_id: str) -> Sample:
    """One line as a sample. Raises ValueError that says what is wrong with it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f'expected a JSON object such as {{"prompt": …}}, got {_short(row)}')
    for key in row.keys() - set(KEYS):
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "what rewards and metrics need goes into 'meta'"
        raise ValueError(f"unknown key {key!r}; {hint}")
    if "prompt" not in row:
        raise ValueError("there is no 'prompt'")
    if not isinstance(row["prompt"], str):
        raise ValueError(f"'prompt' must be a string, got {_short(row['prompt'])}")
    sample_id, meta = row.get("id", default_id), row.get("meta", {})
    if not isinstance(sample_id, str | int) or isinstance(sample_id, bool):
        raise ValueError(f"'id' must be a string or an integer, got {_short(sample_id)}")
    if not isinstance(meta, dict):
        raise ValueError(f"'meta' must be an object, got {_short(meta)}")
    return Sample(sample_id=str(sample_id), prompt=row["prompt"], references=_references(row), meta=meta)


def _references(row: dict[str, Any]) -> list[str]:
    if "reference" in row and "references" in row:
        raise ValueError("both 'reference' and 'references'; give one of them")
    if "reference" in row:
        if not isinstance(row["reference"], str):
            raise ValueError(f"'reference' must be a string, got {_short(row['reference'])}")
        return [row["reference"]]
    references = row.get("references", [])
    if not isinstance(references, list) or not all(isinstance(reference, str) for reference in references):
        raise ValueError(f"'references' must be a list of strings, got {_short(references)}")
    return references


def _file(split: str, path: str | os.PathLike[str] | None, data_files: Mapping[str, str] | None) -> Path:
    if (path is None) == (data_files is None):
        raise ValueError(
            "datapool jsonl: give either `path` (a folder with train.jsonl, val.jsonl and test.jsonl) or `data_files`"
        )
    if data_files is not None:
        if split not in data_files:
            raise ValueError(
                f"datapool jsonl: data_files has no {split!r} (it has {', '.join(data_files) or 'nothing'}); add it"
            )
        file = Path(data_files[split])
        fix = f"correct data_files.{split}"
    else:
        assert path is not None
        file = Path(path) / f"{split}.jsonl"
        fix = f"write it, correct `path` ({path}), or name the files in `data_files`"
    if not file.is_file():
        raise ValueError(
            f"datapool jsonl: there is no file {file} for the {split} split (looked from {Path.cwd()}); {fix}"
        )
    return file


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
