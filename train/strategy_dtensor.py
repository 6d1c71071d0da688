"""Parameters that lie in parts on the ranks as DTensors (FSDP2, tensor parallel): made whole and filled, the optimizer
step over them, and the optimizer's files."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce, get_rank
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

_REST = "rest"  # what is no tensor of a parameter: the groups, and numbers


def whole(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU of process 0, brought together one after another; elsewhere nothing."""
    state = {}
    for name, value in named.items():
        value = value.detach()
        if isinstance(value, DTensor):
            value = value.to(value.device_mesh.device_type).full_tensor()  # what is offloaded to the CPU, too
        if get_rank() == 0:
            state[name] = value.cpu().contiguous().clone()
    return state


@torch.no_grad()
def put(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copies whole tensors of the same names, which every rank has, into parameters and buffers; none is sent."""
    for name, target in targets.items():
        value = state[name]
        if isinstance(target, DTensor):
            value = distribute_tensor(value.detach(), target.device_mesh, target.placements, src_data_rank=None)
        local(target).copy_(local(value))


def local(value: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def names_by_id(model: nn.Module) -> dict[int, str]:
    """{id(parameter): its name}, for `follow`."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def follow(optimizer: Any, names: Mapping[int, str], model: nn.Module) -> None:
    """Gives an optimizer the parts in place of the whole parameters that it was made for.

    names: of those, as they were called before `model` was cut up.
    """
    now = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [now[names[id(parameter)]] for parameter in group["params"]]
    optimizer.state.clear()  # what an optimizer may have begun with (Adagrad), it makes anew


def clip_and_step(optimizer: Any, max_grad_norm: float, device: torch.device) -> float:
    """Clips the joint gradient of all the optimizer's parameters, steps and clears; the norm before clipping.

    A norm that is not finite is returned on every rank, with nothing changed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # sums not yet made
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    norm = joint_norm((p.grad for p in parameters), device)
    if torch.isfinite(torch.tensor(norm)):
        factor = min(1.0, max_grad_norm / (norm + 1e-6))
        for parameter in parameters:
            local(parameter.grad).mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    return norm


def joint_norm(gradients: Iterable[Tensor], device: torch.device) -> float:
    """2-norm of all gradients together: what is cut up is added over the ranks, what all of them hold counts once."""
    squares = torch.zeros(2, dtype=torch.float64, device=device)  # in parts, whole
    for gradient in gradients:
        is_cut = isinstance(gradient, DTensor) and any(isinstance(p, Shard) for p in gradient.placements)
        squares[0 if is_cut else 1] += torch.linalg.vector_norm(local(gradient).float()).double().to(device) ** 2
    in_parts, complete = squares.unbind()
    all_reduce(in_parts, op=ReduceOp.SUM)
    return float((in_parts + complete).sqrt())


def save_optimizer(optimizer: Any, folder: Path) -> None:
    """Writes each rank's part of the state, with torch.distributed.checkpoint."""
    described = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for index, entries in described["state"].items():
        for key, value in entries.items():
            kept: dict[str, Any] = tensors if isinstance(value, Tensor) else rest
            kept[f"{index}.{key}"] = value
    tensors[_REST] = _to_bytes({"state": rest, "param_groups": described["param_groups"]})
    dcp.save(tensors, checkpoint_id=folder / "optimizer")


def load_optimizer(optimizer: Any, folder: Path) -> None:
    """Puts the state back, bit by bit."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors: dict[str, Tensor] = {}
    saved: Any
    for name, saved in dcp.FileSystemReader(folder / "optimizer").read_metadata().state_dict_metadata.items():
        dtype, index = saved.properties.dtype, name.split(".")[0]
        tensors[name] = torch.zeros(saved.size, dtype=dtype)
        if name != _REST and saved.size == parameters[int(index)].shape:
            tensors[name] = torch.zeros_like(parameters[int(index)], dtype=dtype)
    dcp.load(tensors, checkpoint_id=folder / "optimizer")
    rest = _from_bytes(tensors.pop(_REST))
    state: dict[int, dict[str, Any]] = {}
    for name, value in (tensors | rest["state"]).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})


def _to_bytes(item: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(item, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
