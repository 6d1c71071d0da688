"""Tensor parallel: each process computes with a part of every large matrix, all of them on the same data.

The plan of a model's family in transformers says which matrices are cut up, and how.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from train import strategy_dtensor

INSTEAD = "accelerate_configs/fsdp2.yaml, zero3.yaml or device_map.yaml spread any model over several GPUs"


def no_parallelism() -> ParallelismConfig:
    """For Accelerator(), which would only look at the sizes, and refuses them on CPUs."""
    return ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)


class TensorParallel:
    """See `train.strategy.Strategy`. All processes together are one rank: there is no other that a forward could wait
    for, and nothing to gather before generating."""

    name = "tensor_parallel"
    in_step = False
    can_discard = True

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", 1)) for name in ("TP", "CP", "SP")}
        sizes["DP"] = int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", 1))
        self.size = accelerator.num_processes
        if sizes != {"TP": self.size, "CP": 1, "SP": 1, "DP": 1}:
            raise ValueError(
                f"parallelism_config_tp_size is {sizes['TP']} with {self.size} processes in the accelerate config: all "
                "processes together have to be one tensor parallel group (num_processes the same number, no other "
                f"size above 1); {INSTEAD}"
            )
        if accelerator.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision {accelerator.mixed_precision} is not available here: use bf16")
        self.mesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("tp",))

    def prepare(self, model: Any, optimizer: Any, max_grad_norm: float) -> tuple[Any, Any]:
        if not any(parameter.requires_grad for parameter in model.policy.parameters()):
            raise ValueError(
                "TRPO's step needs the policy's weights whole in each process, and tensor parallel ones hold parts: "
                "launch with another accelerate config, such as accelerate_configs/ddp.yaml, fsdp2.yaml or zero3.yaml"
            )
        names = strategy_dtensor.names_by_id(model)
        for part in (model.policy.lm, model.critic):
            if part is not None:
                cut_up(part, self.mesh)
        strategy_dtensor.follow(optimizer, names, model.to(self.device))
        for group in optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = False  # takes no groups of which some are DTensors
        if self.accelerator.mixed_precision == "bf16":
            model.forward = self.accelerator.autocast()(model.forward)
        return model, optimizer

    def cast(self, module: nn.Module) -> None:
        """As it is: forwards run in mixed precision."""

    def place(self, module: Any) -> nn.Module:
        cut_up(module.lm, self.mesh)
        placed: nn.Module = module.to(self.device)
        return placed

    def unwrap(self, model: Any) -> Any:
        return model

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def accumulating(self, model: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, model: Any, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, model: Any, optimizer: Any, max_grad_norm: float) -> float:
        gradients = [p.grad for p in model.parameters() if p.grad is not None and not isinstance(p.grad, DTensor)]
        if gradients:  # the same everywhere, as far as kernels give the same bits; in weights a difference would grow
            together = torch.cat([gradient.flatten() for gradient in gradients])
            broadcast(together, src=0)
            for gradient, piece in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(piece.view_as(gradient))
        return strategy_dtensor.clip_and_step(optimizer, max_grad_norm, self.device)

    @contextlib.contextmanager
    def gathered(self, *modules: nn.Module, write: bool = False) -> Iterator[None]:
        yield  # models are used, and copied from one to another, as they are

    in_parts = gathered

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return strategy_dtensor.whole(named)

    def put(self, targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        strategy_dtensor.put(targets, state)

    def save_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        strategy_dtensor.save_optimizer(optimizer, folder)

    def load_optimizer(self, model: Any, optimizer: Any, folder: Path) -> None:
        strategy_dtensor.load_optimizer(optimizer, folder)


def cut_up(lm: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leaves this process its part of each matrix in the plan of the model's family, and joins results where needed.

    Raises ValueError for a model without a plan, or whose attention heads cannot be shared out.
    """
    if not lm.tp_plan:
        raise ValueError(
            f"{type(lm).__name__} cannot be tensor parallel: transformers has no plan for {lm.config.model_type} "
            f"(base_model_tp_plan), as it has for llama and qwen2; {INSTEAD}"
        )
    config = lm.config.get_text_config(decoder=True)
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, None)) is not None and heads % mesh.size():
            raise ValueError(
                f"{type(lm).__name__} has {key} {heads}, which {mesh.size()} tensor parallel processes cannot share: "
                f"choose parallelism_config_tp_size accordingly; {INSTEAD}"
            )
    plan, _, _ = lm._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    known = {name for name, _ in lm.named_parameters()}  # a tied weight by one of its names
    modules = dict(lm.named_modules())
    for name in [name for name in plan if isinstance(modules.get(name), LoraLayer)]:
        plan |= adapter_plan(name, modules[name], plan.pop(name))
    apply_tensor_parallelism(lm, mesh, {name: style for name, style in plan.items() if name in known | modules.keys()})
    lm.tie_weights(recompute_mapping=False)


def adapter_plan(name: str, layer: Any, style: str) -> dict[str, str]:
    """The plan of a layer with low-rank adapters: its base as it was, and of B·A the matrix on the side that is cut."""
    side = {"colwise": layer.lora_B, "rowwise": layer.lora_A}.get(style)
    if side is None:
        raise ValueError(f"lora.target_modules: {name} is tensor parallel of kind {style} and cannot have an adapter")
    prefix = "lora_B" if side is layer.lora_B else "lora_A"
    parts = {"base_layer": layer.base_layer, **{f"{prefix}.{adapter}": matrix for adapter, matrix in side.items()}}
    plan: dict[str, str] = {}
    for part, matrix in parts.items():
        plan |= {f"{name}.{part}.{own}": style for own, _ in matrix.named_parameters()}
        plan[f"{name}.{part}"] = style
    return plan
