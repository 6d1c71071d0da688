"""Counts the bytes of tensors that hold no numbers (torch's fake tensors): what code takes, without taking it."""

import contextlib
import ctypes
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
Kind = Callable[[Any, Sequence[Any], Tensor], "str | None"]
"""(operation, its arguments, what it made) → what the memory is for; None: whatever is going on."""


class Heap:
    """glibc's allocator as runs on CPUs have it (train.setup.reuse_freed_memory), in this very process.

    It is asked for the blocks of a run in their order, beside the small ones of torch's own; none is ever written to,
    so that they take no memory. How far it grows says what the holes between blocks cost.
    """

    def __init__(self) -> None:
        self.libc = ctypes.CDLL("libc.so.6")
        self.libc.mallinfo2.restype = _MallInfo
        self.libc.memalign.restype, self.libc.memalign.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
        self.libc.free.argtypes = [ctypes.c_void_p]
        self.before = self.libc.mallinfo2().arena

    @staticmethod
    def is_there() -> bool:
        """Whether this system has glibc 2.33 or later."""
        name, version = platform.libc_ver()
        return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 33)

    def take(self, n: int) -> int | None:
        """A block as torch asks for it; None for nothing."""
        return self.libc.memalign(64, n) if n else None

    def give(self, block: int | None) -> None:
        self.libc.free(block)

    @property
    def grown(self) -> int:
        """Bytes by which it is larger than at first."""
        return int(self.libc.mallinfo2().arena - self.before)


class _MallInfo(ctypes.Structure):
    # fmt: off
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]
    # fmt: on


@dataclass
class Peak:
    """Bytes at the moment when most were in use, by what they are for."""

    parts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass
class _Entry:
    purpose: str
    n: int
    storage: Any = None


class Ledger(TorchDispatchMode):
    """While it is on, keeps count of the storages that are alive.

    Fake tensors have no values, so what code asks of them is answered: a number is 1, all() is true, other truths are
    not, and every entry of a mask counts.
    """

    def __init__(self, kind: Kind = lambda *_: None, heap: Heap | None = None) -> None:
        super().__init__()
        self.kind, self.heap = kind, heap
        self.purpose, self.blind = "batches", False
        self.live: Counter[str] = Counter()
        self.peak = Peak()
        self._highest = self._total = 0
        self._known: dict[int, _Entry] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            x = args[0]
            return hasattr(x, "is_of_all") if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1
        if func is aten.allclose.default:
            return True
        if func is aten.nonzero.default:
            result = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        else:
            result = func(*args, **(kwargs or {}))
        if func in (aten.all.default, aten.all.dim):
            result.is_of_all = True
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._note(x, func, args)
        return result

    def _note(self, x: Tensor, func: Any, args: Any) -> None:
        storage = x.untyped_storage()
        key, n = storage._cdata, 0 if self.blind else storage.nbytes()
        if key in self._known:
            return
        entry = _Entry(self.kind(func, args, x) or self.purpose, n)
        block = self.heap.take(n) if self.heap else None

        def gone(_: Any) -> None:
            del self._known[key]
            self._change(entry.purpose, -n)
            if self.heap:
                self.heap.give(block)

        entry.storage = weakref.ref(storage, gone)
        self._known[key] = entry
        self._change(entry.purpose, n)

    def _change(self, purpose: str, n: int) -> None:
        self.live[purpose] += n
        self._total += n
        if self._total > self._highest:
            self._highest, self.peak = self._total, Peak(Counter(self.live))

    def rename(self, x: Tensor, purpose: str) -> None:
        """What a tensor's memory is for, said once it is known."""
        if (entry := self._known.get(x.untyped_storage()._cdata)) is not None:
            self.live[entry.purpose] -= entry.n
            self.live[purpose] += entry.n
            entry.purpose = purpose

    @contextlib.contextmanager
    def during(self, purpose: str) -> Iterator[None]:
        """Memory that is taken in the context is for this, unless `kind` knows better."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """What is made in the context does not count."""
        before, self.blind = self.blind, True
        try:
            yield
        finally:
            self.blind = before

    def take(self, purpose: str, n: int, *, in_heap: bool = True) -> int | None:
        """n bytes more are in use; returns what `give` needs to know. in_heap: in the CPU allocator's blocks."""
        self._change(purpose, n)
        return self.heap.take(n) if self.heap and in_heap else None

    def give(self, purpose: str, n: int, block: int | None) -> None:
        """They are no longer."""
        self._change(purpose, -n)
        if self.heap:
            self.heap.give(block)

    @contextlib.contextmanager
    def holding(self, purpose: str, n: float, *, in_heap: bool = True) -> Iterator[None]:
        """n bytes more are in use in the context."""
        block = self.take(purpose, int(n), in_heap=in_heap)
        try:
            yield
        finally:
            self.give(purpose, int(n), block)

    @contextlib.contextmanager
    def phase(self) -> Iterator[list[Peak]]:
        """Yields a list that has the peak within the context when it is over."""
        found: list[Peak] = []
        self._highest, self.peak = self._total, Peak(Counter(self.live))
        yield found
        found.append(self.peak)
