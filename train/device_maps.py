"""Which module of which model lies on which GPU of a process. Plans only: nothing is moved, no GPU need be there.

GPUs are counted from the first of the process, 0, so that one plan serves all processes.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accelerate.utils import convert_file_size_to_int, find_tied_parameters, get_balanced_memory, infer_auto_device_map
from torch import Tensor, nn
from transformers import PreTrainedModel

from train.config_loader import unknown

DeviceMap = dict[str, int]

FREE_SHARE = 0.8
"""Of a GPU's free memory, what may be planned with: activations, caches and logits need the rest."""
_TRAINED = 4  # weights, gradient, and AdamW's two moments
_KEY = "alg.policy.args.device_map"


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that share memory under each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(model.named_buffers(remove_duplicate=False))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers, shared ones once."""
    return sum(x.nbytes for x in {id(x): x for x in tensors_of(model).values()}.values())


def state_bytes(model: nn.Module) -> int:
    """Bytes of weights and buffers, and of gradients and AdamW's moments of those that are trained."""
    trained = {id(x): x for x in model.parameters() if x.requires_grad}.values()
    return weight_bytes(model) + (_TRAINED - 1) * sum(x.nbytes for x in trained)


def plan(
    wanted: str | Mapping[str, Any],
    policy: PreTrainedModel,
    others: Mapping[str, PreTrainedModel],
    capacity: Sequence[int],
) -> dict[str, DeviceMap]:
    """{"policy": {module: GPU}, ...} for the policy and all others (critic, reference, mask policy).

    wanted: "auto" or "balanced" (GPUs hold equal parts of each model), "sequential" (one after the other is filled), or
    a map of the policy's modules. capacity: bytes of each GPU for weights, gradients and optimizer of all models: every
    model gets a share in proportion to its need. Raises ValueError if they do not fit, or for a map that is wrong.
    """
    models = {"policy": policy, **others}
    if isinstance(wanted, str):
        logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)  # of GPUs that are not there
        total = sum(map(state_bytes, models.values()))
        if total > sum(capacity):
            raise ValueError(_too_large(models, capacity))
        shares = {name: [int(x * weight_bytes(model) / total) for x in capacity] for name, model in models.items()}
        maps = {name: _inferred(model, shares[name], wanted != "sequential") for name, model in models.items()}
        if any("disk" in device_map.values() for device_map in maps.values()):
            raise ValueError(_too_large(models, capacity))
        return {name: _expanded(maps[name], model) for name, model in models.items()}
    given = _checked(wanted, policy, len(capacity))
    return {name: _expanded(_renamed(given, policy, model), model) for name, model in models.items()}


def budgets(max_memory: Mapping[str, Any], n_gpus: int) -> list[int]:
    """Bytes of each GPU out of {number: "10GiB" or bytes}; a GPU that is not named is not used. Raises ValueError."""
    key, found = "alg.policy.args.max_memory", [0] * n_gpus
    for name, size in max_memory.items():
        if not str(name).isdigit() or int(name) >= n_gpus:
            raise ValueError(
                f"{key}: {name!r} is no GPU of a process, which has {n_gpus}: 0 to {n_gpus - 1}; weights that are "
                "trained cannot lie elsewhere (those of the reference may: alg.policy.args.reference_device)"
            )
        try:
            found[int(name)] = convert_file_size_to_int(size)
        except ValueError as error:
            raise ValueError(f"{key}: {size!r} is no size; write 10GiB, 500MiB, or a number of bytes") from error
    return found


def describe(maps: Mapping[str, DeviceMap], models: Mapping[str, nn.Module], n_gpus: int) -> list[str]:
    """One line for each model: how many GiB of its weights, gradients and optimizer lie on each GPU."""
    lines = []
    for name, device_map in maps.items():
        spent, seen = [0] * n_gpus, set[int]()
        for tensor_name, x in tensors_of(models[name]).items():
            if id(x) not in seen:
                seen.add(id(x))
                spent[device_of(tensor_name, device_map)] += x.nbytes * (_TRAINED if x.requires_grad else 1)
        parts = ", ".join(f"GPU {gpu}: {size / 2**30:.2f} GiB" for gpu, size in enumerate(spent))
        lines.append(f"device map of the {name.replace('_', ' ')}: {parts}")
    return lines


def device_of(name: str, device_map: Mapping[str, int]) -> int:
    """The GPU of a tensor or module: that of the nearest module around it in the map, else the first."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name, 0)


def _inferred(model: PreTrainedModel, sizes: Sequence[int], balanced: bool) -> DeviceMap:
    model.tie_weights()
    blocks = sorted(model._no_split_modules or [])
    limits: dict[Any, Any] = dict(enumerate(sizes))
    if balanced:
        limits = get_balanced_memory(model, max_memory=limits, no_split_module_classes=blocks)
    return dict(infer_auto_device_map(model, max_memory=limits, no_split_module_classes=blocks))


def _too_large(models: Mapping[str, nn.Module], capacity: Sequence[int]) -> str:
    needs = ", ".join(f"{name.replace('_', ' ')} {state_bytes(model) / 2**30:.3g}" for name, model in models.items())
    room = " + ".join(f"{size / 2**30:.3g}" for size in capacity)
    return (
        f"{_KEY}: weights, gradients and optimizer do not fit on the GPUs of a process. They take (GiB) {needs}; there "
        f"is room for {room}, cut at whole blocks. Raise distributed.gpus_per_process or alg.policy.args.max_memory, "
        "or take alg.policy.args.dtype bfloat16, lora, value_model shared, or reference_device cpu"
    )


def _checked(wanted: Mapping[str, Any], policy: PreTrainedModel, n_gpus: int) -> DeviceMap:
    """A map that was written by hand, if it is one of this model and of these GPUs."""
    names = dict(policy.named_modules())
    for name, device in wanted.items():
        if name not in names:
            raise ValueError(f"{_KEY}: {unknown('module', name, names)}")
        if not str(device).isdigit() or int(device) >= n_gpus:
            cure = "" if device not in ("cpu", "disk") else "; weights that are trained cannot lie there"
            raise ValueError(
                f"{_KEY}: {name}: {device!r} is no GPU of a process, which has {n_gpus}: 0 to {n_gpus - 1}{cure}"
            )
    given = {name: int(device) for name, device in wanted.items()}
    _check_covered(given, policy)
    _check_together(given, policy)
    return given


def _check_covered(given: DeviceMap, policy: PreTrainedModel) -> None:
    stored = policy.state_dict()
    left = [name for name in stored if not any(f"{name}.".startswith(f"{key}.") or not key for key in given)]
    if left := [name for name in left if "." in name]:  # a tensor of the model itself goes to the first GPU
        modules = dict.fromkeys(name.rpartition(".")[0] for name in left)
        raise ValueError(f"{_KEY} says nothing of {_some(modules)}: give these modules, or one around them, a GPU")


def _check_together(given: DeviceMap, policy: PreTrainedModel) -> None:
    for tied in find_tied_parameters(policy):
        if len({device_of(name, given) for name in tied}) > 1:
            raise ValueError(f"{_KEY}: {_some(tied)} are one weight: give them the same GPU")
    kinds = set(policy._no_split_modules or ())
    for name, block in [(name, module) for name, module in policy.named_modules() if type(module).__name__ in kinds]:
        if len(set(_expanded(given, block, name, device_of(name, given)).values())) > 1:
            raise ValueError(f"{_KEY}: {name} is one block, and its parts need the same GPU")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _renamed(given: DeviceMap, policy: PreTrainedModel, model: PreTrainedModel) -> DeviceMap:
    """The map for a model whose modules may have the policy's names without the first part: a critic's trunk."""
    prefix, names = policy.base_model_prefix, dict(model.named_modules())
    found = {}
    for name, device in given.items():
        own = name if name in names else name.removeprefix(prefix).removeprefix(".")
        if own in names:
            found[own] = device
    return found


def _expanded(given: DeviceMap, module: nn.Module, name: str = "", gpu: int = 0) -> DeviceMap:
    """The map without modules of which a part is elsewhere, and with all that it leaves out (rotary tables, which
    nothing is stored of). accelerate's hooks of a module and of its parts would contradict each other, and it takes the
    whole model, "", to be on the first GPU whatever the map says."""
    gpu, prefix = given.get(name, gpu), f"{name}." if name else ""
    if name and not any(key.startswith(prefix) for key in given):
        return {name: gpu}
    tensors = [prefix + own for own in (*module._parameters, *module._buffers)]
    found = {tensor: given.get(tensor, gpu) for tensor in tensors}
    for child_name, child in module.named_children():
        found |= _expanded(given, child, prefix + child_name, gpu)
    return found
