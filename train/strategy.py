"""How models are spread over the ranks: what every strategy offers, and one process or a copy per rank (DDP).

The others are in train.strategy_deepspeed, train.strategy_fsdp and train.strategy_tensor_parallel; these modules and
train.distributed are all that knows accelerate and DeepSpeed.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.placement import is_spread, wrap_data_parallel


class Strategy(Protocol):
    """name: as checkpoints say it. in_step: a forward exchanges weights, so that all ranks must call equally often.
    can_discard: gradients that were added can be thrown away before the step."""

    name: str
    in_step: bool
    can_discard: bool

    def prepare(self, model: nn.Module, optimizer: Any, max_grad_norm: float) -> tuple[Any, Any]:
        """Wraps policy and critic, and the optimizer of some or all of their parameters."""

    def cast(self, module: nn.Module) -> None:
        """Gives a frozen model that is not placed the precision of those that are."""

    def place(self, module: nn.Module) -> nn.Module:
        """A frozen language model (reference, mask policy) where it is to run, in parts if the strategy says so."""

    def unwrap(self, model: Any) -> Any:
        """The module inside what `prepare` made; calling it is right wherever no gradient is wanted."""

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which modules run that `prepare` has not wrapped, or that are called unwrapped."""

    def accumulating(self, model: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Surrounds forward and backward of a micro-batch; `last` of an optimizer step."""

    def backward(self, model: Any, loss: Tensor, last: bool) -> None:
        """Adds the gradient of the mean of `loss` over the ranks."""

    def step(self, model: Any, optimizer: Any, max_grad_norm: float) -> float:
        """Clips the joint gradient, steps, clears the gradient; the norm before clipping. Where that is not finite it
        is returned as it is, on every rank, and nothing was changed."""

    def gathered(self, *modules: nn.Module, write: bool = False) -> contextlib.AbstractContextManager[Any]:
        """The modules' parameters are whole on each rank, which may use them without the others. write: what every rank
        writes to them, the same on each, stays."""

    def in_parts(self, *modules: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Language models that are generated from while they stay in parts, all ranks in step."""

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the CPU of process 0; elsewhere nothing. All ranks call it."""

    def put(self, targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copies whole tensors of the same names, which every rank has, into (parts of) parameters."""

    def save_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        """Writes the optimizer's state into a folder that exists. All ranks call it."""

    def load_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        """Puts it back, bit by bit; under the same number of ranks. All ranks call it."""


class Replicated:
    """One process, or a whole copy of the models on every rank (DDP). Models that lie on several devices of their
    process (train.placement) stay where they are."""

    in_step = False
    can_discard = True

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        if accelerator.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision {accelerator.mixed_precision} is not available: use bf16")
        self.name = "ddp" if accelerator.num_processes > 1 else "single"

    def prepare(self, model: nn.Module, optimizer: Any, max_grad_norm: float) -> tuple[Any, Any]:
        if not is_spread(model):
            prepared: tuple[Any, Any] = self.accelerator.prepare(model, optimizer)
            return prepared
        in_precision = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        wrapped = wrap_data_parallel(in_precision) if self.accelerator.num_processes > 1 else in_precision
        return wrapped, self.accelerator.prepare(optimizer)

    def cast(self, module: nn.Module) -> None:
        """As it is: forwards run in mixed precision."""

    def place(self, module: nn.Module) -> nn.Module:
        return module.to(self.device)

    def unwrap(self, model: Any) -> Any:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    @contextlib.contextmanager
    def accumulating(self, model: Any, last: bool) -> Iterator[None]:
        # Gradients are exchanged in the last backward of an optimizer step only.
        with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
            yield

    def backward(self, model: Any, loss: Tensor, last: bool) -> None:
        self.accelerator.backward(loss)

    def step(self, model: Any, optimizer: Any, max_grad_norm: float) -> float:
        norm = float(self.accelerator.clip_grad_norm_(model.parameters(), max_grad_norm))
        if torch.isfinite(torch.tensor(norm)):
            optimizer.step()
            optimizer.zero_grad()
        return norm

    @contextlib.contextmanager
    def gathered(self, *modules: nn.Module, write: bool = False) -> Iterator[None]:
        yield

    in_parts = gathered

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.accelerator.process_index > 0:
            return {}
        return {name: value.detach().cpu().contiguous() for name, value in named.items()}

    def put(self, targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(state[name])

    def save_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        if self.accelerator.process_index == 0:
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def load_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        # Through the CPU's memory, from where it is copied: a rank's device may be called cpu:0, which torch.load does
        # not know.
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))
