"""Ranks: start-up and its guard, reductions, the optimizer step. With train.strategy*, all that imports accelerate."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, broadcast_object_list, gather_object
from torch import Tensor, nn

from train.launching import LaunchError, check_world, has_accelerator, requested
from train.placement import environment
from train.strategy import Replicated, Strategy

Sums = Mapping[str, tuple[Any, Any]]


class Ranks:
    """The processes of a run as one of them sees it.

    rank, world_size: this process' number, and how many there are, counting those that share one model's tensors as
    one. device: where its models live. strategy: how they are spread.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        trackers: Iterable[str] = (),
        logging_dir: str | None = None,
        gpus_per_process: int = 1,
    ) -> None:
        """Joins the other ranks.

        Raises LaunchError if the world is not the one that was asked for, ValueError for what a strategy cannot do.
        """
        asked, kind = list(trackers), requested()
        environment(gpus_per_process)
        options: dict[str, Any] = {}
        backend = None
        if kind == "deepspeed":
            from train.deepspeed_config import make_plugin

            options["deepspeed_plugin"] = make_plugin()
            backend = None if has_accelerator() else "gloo"
        if kind == "tensor_parallel":
            from train.strategy_tensor_parallel import no_parallelism

            options["parallelism_config"] = no_parallelism()
        self.accelerator = Accelerator(
            log_with=asked or None,
            project_config=ProjectConfiguration(project_dir=logging_dir, logging_dir=f"{logging_dir}/tensorboard"),
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=timeout_s))],
            **options,
        )
        self.process_index, self.num_processes = self.accelerator.process_index, self.accelerator.num_processes
        self.rank, self.world_size = self.process_index, self.num_processes
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.device = self.accelerator.device
        check_world(self.num_processes, int(self.sum(torch.ones(1))[0]))
        self.strategy = self._strategy(kind)
        found = {str(getattr(tracker, "value", tracker)) for tracker in self.accelerator.log_with}
        if missing := [name for name in asked if name not in found]:
            raise ValueError(f"tracking.trackers: {', '.join(missing)} cannot be used here; is the package installed?")

    def _strategy(self, kind: str) -> Strategy:
        if kind == "deepspeed":
            from train.strategy_deepspeed import DeepSpeed

            if self.accelerator.distributed_type.value != "DEEPSPEED":
                raise LaunchError(f"DeepSpeed was asked for, and accelerate runs {self.accelerator.distributed_type}")
            return DeepSpeed(self.accelerator, self.agree_max)
        if kind == "fsdp":
            from train.strategy_fsdp import FSDP2

            return FSDP2(self.accelerator)
        if kind == "tensor_parallel":
            from train.strategy_tensor_parallel import TensorParallel

            self.rank, self.world_size = 0, 1
            return TensorParallel(self.accelerator)
        return Replicated(self.accelerator)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes the files."""
        return self.process_index == 0

    def agree_max(self, n: int) -> int:
        """The largest of all ranks' numbers where they go in step, else this rank's own."""
        return int(self.max(torch.tensor(n))) if self.strategy.in_step else n

    def agree_any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return bool(self.max(torch.tensor(int(flag))))

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
        """Process 0's object, on every process."""
        return broadcast_object_list([item])[0] if self.num_processes > 1 else item

    def same(self, item: Any) -> Any:
        """One object for all processes that share a model's tensors: those would not notice that they disagree."""
        return self.broadcast(item) if self.num_processes > self.world_size else item

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.num_processes > 1:
            # Not accelerate's: it takes GPU number local_rank, which with several GPUs a process is another's.
            on_gpu = self.device.type == "cuda"
            torch.distributed.barrier(device_ids=[self.device.index] if on_gpu else None)

    # The model under training.

    def prepare(self, model: nn.Module, optimizer: Any, max_grad_norm: float) -> tuple[Any, Any]:
        """Wraps policy and critic, and the optimizer of (some of) their parameters, for the strategy in force."""
        self._still: str | None = None
        optimizer.register_step_pre_hook(self._leave_alone)
        return self.strategy.prepare(model, optimizer, max_grad_norm)

    def _leave_alone(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._still is not None:
            for group in optimizer.param_groups:
                if group["name"].startswith(self._still):
                    for parameter in group["params"]:
                        parameter.grad = None

    def unwrap(self, model: Any) -> Any:
        """The module inside the wrapper, for forwards without gradient and for parts of it."""
        return self.strategy.unwrap(model)

    def precision(self) -> Any:
        """Context in which a module that was not prepared runs in the launch's mixed precision."""
        return self.strategy.precision()

    def backward(self, model: Any, loss_sum: Tensor, global_count: float, last: bool = True) -> None:
        """Adds the gradient of loss_sum / global_count, summed over ranks (strategies average, hence the factor)."""
        self.strategy.backward(model, loss_sum * (self.world_size / global_count), last)

    @contextlib.contextmanager
    def accumulating(self, model: Any, last: bool) -> Iterator[None]:
        """Surrounds forward and backward of a micro-batch; `last` of an optimizer step."""
        with self.strategy.accumulating(model, last):
            yield

    def step(self, model: Any, optimizer: Any, max_grad_norm: float, still: str | None = None) -> float:
        """Clips the joint gradient, steps, clears the gradient. Returns the norm before clipping.

        still: groups of parameters whose names begin so are left alone, the optimizer's moments of them too. Raises
        FloatingPointError, without a step, if the norm is not finite (then it is so on every rank).
        """
        self._still = still
        norm = self.strategy.step(model, optimizer, max_grad_norm)
        if not torch.isfinite(torch.tensor(norm)):
            raise FloatingPointError(f"the gradient's norm is {norm}: look at the rewards, and at the learning rate")
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
