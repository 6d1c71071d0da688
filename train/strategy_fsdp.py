"""FSDP2: parameters, gradients and optimizer state in parts on the ranks; each block is made whole where it runs.

torch's fully_shard by hand, on CPUs as on GPUs (accelerate ignores its FSDP plugin on CPUs).
"""

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from train import strategy_dtensor


class FSDP2:
    """See `train.strategy.Strategy`. From the accelerate config come fsdp_reshard_after_forward, fsdp_offload_params
    and mixed_precision.

    A policy that is frozen when it comes to `prepare` (TRPO's) stays whole on every rank, as a plain module.
    """

    name = "fsdp2"
    in_step = True
    can_discard = True

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        # Would leave the weights of all ranks but one empty in from_pretrained.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view")  # nobody writes to it
        if accelerator.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision {accelerator.mixed_precision} is not available under FSDP2: use bf16")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        self.reshard_after_forward = bool(plugin.reshard_after_forward)
        offload = isinstance(plugin.cpu_offload, CPUOffloadPolicy) and self.device.type != "cpu"
        self.precise = MixedPrecisionPolicy()
        self.mixed = self.precise
        if accelerator.mixed_precision == "bf16":
            self.mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.shared: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (accelerator.num_processes,)),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        self.open: set[FSDPModule] = set()  # inside `gathered`

    def prepare(self, model: Any, optimizer: Any, max_grad_norm: float) -> tuple[Any, Any]:
        names = strategy_dtensor.names_by_id(model)
        plain = set()
        if any(parameter.requires_grad for parameter in model.policy.parameters()):
            self._shard(model.policy, self.reshard_after_forward)
        else:
            plain = set(model.policy.to(self.device).parameters())
        if model.critic is not None:
            self._shard(model.critic, self.reshard_after_forward)
        options = {"mp_policy": self.precise, "reshard_after_forward": self.reshard_after_forward}
        fully_shard(model, ignored_params=plain, **options, **self.shared)
        _settle_root(model)
        strategy_dtensor.follow(optimizer, names, model)
        if self.mixed is not self.precise:
            model.forward = self.accelerator.autocast()(model.forward)
        return model, optimizer

    def _shard(self, model: nn.Module, reshard_after_forward: bool) -> None:
        options = {"mp_policy": self.mixed, "reshard_after_forward": reshard_after_forward, **self.shared}
        for block in reversed(blocks(model)):  # those inside others first
            fully_shard(block, **options)
        fully_shard(model, **options)

    def cast(self, module: nn.Module) -> None:
        """As it is: forwards run in mixed precision."""

    def place(self, module: nn.Module) -> nn.Module:
        self._shard(module, reshard_after_forward=True)  # no backward pass would reshard it
        _settle_root(module)
        return module

    def unwrap(self, model: Any) -> Any:
        return model

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def accumulating(self, model: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # gradients are reduced at once: whole ones would need the memory of a model

    def backward(self, model: Any, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, model: Any, optimizer: Any, max_grad_norm: float) -> float:
        return strategy_dtensor.clip_and_step(optimizer, max_grad_norm, self.device)

    @contextlib.contextmanager
    def gathered(self, *modules: nn.Module, write: bool = False) -> Iterator[None]:
        parts = dict.fromkeys(part for module in modules for part in sharded_parts(module) if part not in self.open)
        sharded = [dict(module.named_parameters()) for module in modules if write]
        self.open.update(parts)
        for part in parts:
            part.unshard()
        try:
            with _without_hooks(parts):
                yield
            for module, before in zip(modules, sharded, strict=False):
                strategy_dtensor.put(before, dict(module.named_parameters()))
        finally:
            for part in parts:
                part.reshard()
            self.open.difference_update(parts)

    @contextlib.contextmanager
    def in_parts(self, *modules: nn.Module) -> Iterator[None]:
        # Decoding calls the model inside a module, and with it each block's hooks, but not the module's own.
        outermost = [part for module in modules for part in sharded_parts(module)[:1]]
        own = [part for part in outermost if part not in self.open]
        for module in own:
            module.unshard()
        try:
            with _without_hooks(own):
                yield
        finally:
            for module in own:
                module.reshard()

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return strategy_dtensor.whole(named)

    def put(self, targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        strategy_dtensor.put(targets, state)

    def save_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        strategy_dtensor.save_optimizer(optimizer, folder)

    def load_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        strategy_dtensor.load_optimizer(optimizer, folder)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model: the classes that must not be split, or else the entries of its lists.

    Without those that share a weight with another module, as an embedding does.
    """
    transformers = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    kinds = {kind for part in transformers for kind in part._no_split_modules or ()}
    found = [part for part in model.modules() if type(part).__name__ in kinds]
    if not found:
        lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
        inner = {id(part) for outer in lists for part in outer.modules() if part is not outer}
        found = [entry for outer in lists if id(outer) not in inner for entry in outer]
    places: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)] = places.get(id(parameter), 0) + 1
    return [block for block in found if all(places[id(p)] == 1 for p in block.parameters())]


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """The modules within, and itself, whose parameters are gathered together."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _settle_root(model: nn.Module) -> None:
    """Makes this the root of the modules within; else that would be whichever is called first, as in generation."""
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _without_hooks(parts: Iterable[FSDPModule]) -> Iterator[None]:
    """Calls of the modules no longer gather and release: each rank may make as many as it likes."""
    removed = []
    for part in parts:
        state = fully_shard.state(part)  # type: ignore[attr-defined]
        for hooks, handle in (
            (part._forward_pre_hooks, state._pre_forward_hook_handle),
            (part._forward_hooks, state._post_forward_hook_handle),
        ):
            removed.append((hooks, list(hooks.items())))
            del hooks[handle.id]
    try:
        yield
    finally:
        for hooks, before in removed:
            added = [item for item in hooks.items() if item not in before]
            hooks.clear()
            hooks.update([*before, *added])
