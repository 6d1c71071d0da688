"""Ranks: start-up and its guard, reductions, the optimizer step. The only module that imports accelerate."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, broadcast_object_list, gather_object
from torch import Tensor, nn

Sums = Mapping[str, tuple[Any, Any]]


class LaunchError(RuntimeError):
    """The processes are not those that were asked for; the message says what to change."""


class Ranks:
    """The processes of a run as one of them sees it.

    rank, world_size: this process' number, and how many there are. device: where its models live.
    """

    def __init__(self, *, timeout_s: float, trackers: Iterable[str] = (), logging_dir: str | None = None) -> None:
        """Joins the other ranks. Raises LaunchError if the world is not the one that was asked for."""
        asked = list(trackers)
        self.accelerator = Accelerator(
            log_with=asked or None,
            project_config=ProjectConfiguration(project_dir=logging_dir, logging_dir=f"{logging_dir}/tensorboard"),
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s)),
            ],
        )
        self.rank, self.world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.device = self.accelerator.device
        self._guard()
        found = {str(getattr(tracker, "value", tracker)) for tracker in self.accelerator.log_with}
        if missing := [name for name in asked if name not in found]:
            raise ValueError(f"tracking.trackers: {', '.join(missing)} cannot be used here; is the package installed?")

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes the files."""
        return self.rank == 0

    def _guard(self) -> None:
        wanted = int(os.environ.get("WORLD_SIZE", 1))
        kind = self.accelerator.distributed_type.value
        for variable, needed in (("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"), ("ACCELERATE_USE_FSDP", "FSDP")):
            if os.environ.get(variable, "false").lower() == "true" and kind != needed:
                raise LaunchError(
                    f"the accelerate config asks for {needed}, but this process runs as {kind}; "
                    "on CPU, accelerate ignores it: use accelerate_configs/ddp_cpu.yaml"
                )
        if self.world_size != wanted:
            raise LaunchError(
                f"WORLD_SIZE is {wanted}, but this process believes that it is one of {self.world_size}: each "
                "would train alone. On CPU set ACCELERATE_USE_CPU=true (see accelerate_configs/ddp_cpu.yaml)"
            )
        launched = _processes_asked_of_launcher()
        if launched is not None and launched > 1 and wanted == 1:
            raise LaunchError(
                f"accelerate launch was asked for {launched} processes and started one (it does so with --cpu and with "
                "MULTI_CPU): use --config_file accelerate_configs/ddp_cpu.yaml with ACCELERATE_USE_CPU=true"
            )
        if (counted := int(self.sum(torch.ones(1))[0])) != self.world_size:
            raise LaunchError(f"{counted} ranks answered, {self.world_size} were expected")

    # Reductions: every rank calls them, in the same order, with tensors of the same shape.

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.world_size == 1:
            return tensor
        moved = tensor.to(self.device)
        torch.distributed.all_reduce(moved, op=operation)
        return moved.to(tensor.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        return self._reduce(tensor, torch.distributed.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""
        return self._reduce(tensor, torch.distributed.ReduceOp.MAX)

    def min(self, tensor: Tensor) -> Tensor:
        """Elementwise minimum over ranks."""
        return self._reduce(tensor, torch.distributed.ReduceOp.MIN)

    def mean(self, sums: Sums) -> dict[str, float]:
        """{name: total sum / total count} from each rank's {name: (sum, count)}; 0 for a count of 0."""
        names = sorted(sums)
        pairs = torch.tensor([[float(x) for x in sums[name]] for name in names], dtype=torch.float64).reshape(-1, 2)
        totals = self.sum(pairs)
        return {name: float(s / c) if c else 0.0 for name, (s, c) in zip(names, totals, strict=True)}

    def gather(self, items: list[Any]) -> list[Any]:
        """The concatenated lists of all ranks, in the order of the ranks, on every rank."""
        return gather_object(items) if self.world_size > 1 else items

    def broadcast(self, item: Any) -> Any:
        """Rank 0's object, on every rank."""
        return broadcast_object_list([item])[0] if self.world_size > 1 else item

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.accelerator.wait_for_everyone()

    # The model under training.

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Wraps model and optimizer for the strategy in force."""
        prepared: tuple[nn.Module, Any] = self.accelerator.prepare(model, optimizer)
        return prepared

    def unwrap(self, model: nn.Module) -> Any:
        """The module inside the wrapper; its forward keeps mixed precision."""
        return self.accelerator.unwrap_model(model)

    def precision(self) -> Any:
        """Context in which a module that was not prepared runs in the launch's mixed precision."""
        return self.accelerator.autocast()

    def backward(self, loss_sum: Tensor, global_count: float) -> None:
        """Adds the gradient of loss_sum / global_count, summed over ranks (DDP averages, hence the factor)."""
        self.accelerator.backward(loss_sum * (self.world_size / global_count))

    @contextlib.contextmanager
    def accumulating(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Gradients are exchanged in the last backward of an optimizer step only."""
        with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
            yield

    def step(self, model: nn.Module, optimizer: Any, max_grad_norm: float) -> float:
        """Clips the joint gradient, steps, clears the gradient. Returns the norm before clipping.

        Raises FloatingPointError, without a step, if the norm is not finite (then it is so on every rank).
        """
        norm = float(self.accelerator.clip_grad_norm_(model.parameters(), max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            raise FloatingPointError(f"the gradient's norm is {norm}: look at the rewards, and at the learning rate")
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def start_trackers(self, project_name: str, config: Mapping[str, Any]) -> None:
        """Opens the trackers, and shows them the configuration."""
        simple = {
            name: value if isinstance(value, int | float | bool) else str(value) for name, value in config.items()
        }
        self.accelerator.init_trackers(project_name, config=simple)

    def finish(self) -> None:
        """Closes trackers and the process group."""
        self.accelerator.end_training()


def launcher() -> list[str] | None:
    """The words of the `accelerate launch …` that is this process' parent, if it is one."""
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    if "launch" not in words or not any("accelerate" in word for word in words[: words.index("launch")]):
        return None
    return ["accelerate", *words[words.index("launch") :]]


def _processes_asked_of_launcher() -> int | None:
    """--num_processes (or the config file's) of the `accelerate launch` above this process."""
    if (words := launcher()) is None:
        return None
    options = dict(
        word.split("=", 1) if "=" in word else (word, after)
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )
    options = {name.replace("-", "_"): value for name, value in options.items() if name.startswith("--")}
    if (given := options.get("__num_processes", "")).isdigit():
        return int(given)
    path = Path(options.get("__config_file", ""))
    if path.is_file():
        asked = (yaml.safe_load(path.read_text()) or {}).get("num_processes")
        return int(asked) if asked is not None else None
    return None
