"""Samples of a task, and the file that workers read them from one at a time."""

from __future__ import annotations

import json
import mmap
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, overload

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One prompt with what is needed to reward and evaluate a response to it.

    references may be empty; meta holds whatever a task's rewards and metrics need, as JSON types.
    """

    sample_id: str
    prompt: str
    references: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


def write_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Writes one JSON object per line to `path`, and where each line starts to `path`.idx.

    Each file appears complete or not at all. Raises ValueError if there are no samples or one is not JSON.
    """
    lines = [_line(sample) for sample in samples]
    if not lines:
        raise ValueError(f"no samples to write to {path}: the task's split is empty")
    offsets = np.cumsum([0] + [len(line) for line in lines], dtype=np.int64)
    _replace(os.fspath(path), lambda file: file.writelines(lines))
    _replace(_index_path(path), lambda file: np.save(file, offsets))


class SampleFile(Sequence[Sample]):
    """The samples of a file that `write_samples` wrote, memory-mapped: a line is read and parsed when it is asked for.

    Raises FileNotFoundError if the file or its index is missing, ValueError if they do not belong together.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._offsets = np.load(_index_path(path), mmap_mode="r")
        if os.path.getsize(path) != self._offsets[-1]:
            raise ValueError(f"{path} and its index {_index_path(path)} do not belong together: write them again")
        with open(path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.path}")
        index %= len(self)
        return Sample(**json.loads(self._data[int(self._offsets[index]) : int(self._offsets[index + 1])]))


def _line(sample: Sample) -> bytes:
    try:
        return json.dumps(asdict(sample), ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:  # a type that is not JSON, or a lone surrogate
        raise ValueError(f"sample {sample.sample_id!r} cannot be written as JSON in UTF-8: {error}") from error


def _index_path(path: str | os.PathLike[str]) -> str:
    return os.fspath(path) + ".idx"


def _replace(path: str, write: Callable[[IO[bytes]], object]) -> None:
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
