"""DeepSpeed: optimizer state (ZeRO-1), gradients too (2), weights too (3) in parts on the ranks.

Policy and critic are one module in one engine. The engine is told where an optimizer step ends, and nothing of batch
sizes; losses come in as they are to be averaged over the ranks.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from algorithms.policy import LanguageModel, Scores
from train.deepspeed_config import check_optimizer, engine_config

_TAG = "deepspeed"


class _Outputs(nn.Module):
    """DeepSpeed looks for the tensors that gradients come back through in tuples and dicts only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        scores: Scores = self.inner(*args, **kwargs)
        return vars(scores)


class _Engine:
    """The engine, called as the module inside it is."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Scores:
        return Scores(**self.engine(*args, **kwargs))

    def parameters(self) -> Iterator[nn.Parameter]:
        parameters: Iterator[nn.Parameter] = self.engine.module.parameters()
        return parameters


class DeepSpeed:
    """See `train.strategy.Strategy`. agree: the largest of all ranks' numbers."""

    can_discard = False

    def __init__(self, accelerator: Accelerator, agree: Callable[[int], int]) -> None:
        self.accelerator, self.device, self.agree = accelerator, accelerator.device, agree
        self.config: dict[str, Any] = accelerator.deepspeed_plugin.deepspeed_config
        accelerator.deepspeed_plugin.dschf = None  # by which transformers would load models in parts
        self.stage = int(self.config["zero_optimization"]["stage"])
        self.name, self.in_step = f"zero{self.stage}", self.stage == 3
        self.bf16 = accelerator.mixed_precision == "bf16"
        self.free = False  # inside `gathered`
        self.offloads: list[Any] = []  # DeepSpeed's owners of the hooks that bring weights together, by module
        if accelerator.mixed_precision not in ("no", "bf16"):
            raise ValueError(
                f"mixed_precision {accelerator.mixed_precision} under DeepSpeed skips steps without a word: use bf16"
            )
        if self.bf16 and self.stage == 0:
            raise ValueError("bf16 under ZeRO-0 drifts (DeepSpeed 0.19): use zero_stage 1, or DDP")

    def _initialize(self, module: nn.Module, config: dict[str, Any], optimizer: Any = None) -> Any:
        import deepspeed

        self.cast(module)
        if self.stage == 3:
            # One parameter after another: the engine itself would first move all of them to the GPU.
            remote = (config["zero_optimization"].get("offload_param") or {}).get("device")
            deepspeed.zero.Init(module=module, config_dict_or_path=config, remote_device=remote)
            for buffer in module.buffers():
                buffer.data = buffer.data.to(self.device)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
        if self.stage == 3:
            self.offloads.append(getattr(engine.optimizer, "parameter_offload", engine.optimizer))
            for part in module.modules():
                if isinstance(part, LanguageModel):
                    part.agree = lambda n: n if self.free else self.agree(n)
        return engine

    def prepare(self, model: nn.Module, optimizer: Any, max_grad_norm: float) -> tuple[Any, Any]:
        for parameter in model.parameters():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    "alg.policy.args.dtype must be float32 under DeepSpeed, which keeps its own copy of the weights: "
                    "for bfloat16 launch with --mixed_precision bf16"
                )
        if self.stage > 0:
            check_optimizer(optimizer)
        engine = self._initialize(
            _Outputs(model), engine_config(self.config, numel(model), max_grad_norm=max_grad_norm), optimizer
        )
        return _Engine(engine), engine.optimizer

    def cast(self, module: nn.Module) -> None:
        if self.bf16:
            for parameter in module.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)

    def place(self, module: nn.Module) -> nn.Module:
        if self.stage == 3:
            return self._initialize(module, engine_config(self.config, numel(module), train=False)).module  # type: ignore[no-any-return]
        self.cast(module)
        return module.to(self.device)

    def unwrap(self, model: Any) -> Any:
        return model.engine.module.inner

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # the weights themselves are in bfloat16

    def accumulating(self, model: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
        model.engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, model: Any, loss: Tensor, last: bool) -> None:
        model.engine.backward(loss)
        if not last:
            model.engine.step()  # counts the micro-batch; no step of the optimizer

    def step(self, model: Any, optimizer: Any, max_grad_norm: float) -> float:
        engine = model.engine
        if self.stage == 0:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if not torch.isfinite(torch.tensor(norm)):
                return norm
        engine.step()
        if self.stage > 0:
            norm = float("inf") if optimizer.overflow else float(engine.get_global_grad_norm())
        return norm

    @contextlib.contextmanager
    def gathered(self, *modules: nn.Module, write: bool = False) -> Iterator[None]:
        if self.stage < 3:
            yield
            return
        import deepspeed

        inside = {id(part) for module in modules for part in module.modules()}
        offloads = [it for it in self.offloads if any(id(part) in inside for part in it.module.modules())]
        for offload in offloads:
            offload.partition_all_parameters()  # what the last backward pass has left behind
            offload._remove_module_hooks()
            offload.forward_hooks, offload.backward_hooks = [], []
        parameters = {id(p): p for module in modules for p in module.parameters()}.values()
        context = deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if write else None)
        context.__enter__()
        before, self.free = self.free, True
        yield  # An error ends the run: leaving the context is for all ranks together, and the others may not come.
        self.free = before
        context.__exit__(None, None, None)
        for offload in offloads:
            offload.setup_zero_stage3_hooks()

    @contextlib.contextmanager
    def in_parts(self, *modules: nn.Module) -> Iterator[None]:
        yield
        for offload in self.offloads:  # decoding calls parts of a module, whose weights it leaves where they are
            offload.partition_all_parameters()

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, value in named.items():
            with self._one(value, write=False):
                if self.accelerator.process_index == 0:
                    state[name] = value.detach().clone().cpu().contiguous()
        return state

    def put(self, targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            with self._one(target, write=True), torch.no_grad():
                target.copy_(state[name])

    def _one(self, value: Tensor, write: bool) -> contextlib.AbstractContextManager[Any]:
        import deepspeed

        if not hasattr(value, "ds_id"):
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            [value], modifier_rank=0 if write else None
        )
        return context

    def save_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        model.engine.save_checkpoint(str(folder), tag=_TAG, exclude_frozen_parameters=True)

    def load_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        model.engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=False, load_lr_scheduler_states=False)


def numel(module: nn.Module) -> int:
    """Weights of a module that is still whole."""
    return sum(parameter.numel() for parameter in module.parameters())
