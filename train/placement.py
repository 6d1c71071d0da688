"""Models that are spread over the GPUs of their process (RL4LMs' apply_model_parallel), and which GPUs those are.

With distributed.gpus_per_process g, process i of a machine has its GPUs i·g to i·g + g - 1, and the first of them is
where its batches live. Between processes the models are data parallel.
"""

import os
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import dispatch_model
from accelerate.utils import send_to_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from algorithms.policy import ActorCritic, LanguageModel
from train import device_maps
from train.config import Config
from train.frozen import check_frozen, is_quantized
from train.launching import is_set

PLAIN = ("single", "ddp")  # the strategies under which a model is whole in its process


def environment(
    gpus_per_process: int, *, environ: MutableMapping[str, str] = os.environ, cuda: Any = torch.cuda
) -> None:
    """Makes the first of its GPUs this process' device, for accelerate and for NCCL. Comes before Accelerator().

    Without that, process i would work on GPU i, another's. Nothing is done on the CPU, or with one GPU a process.
    Raises ValueError if the machine has fewer GPUs than its processes need.
    """
    if gpus_per_process == 1 or is_set("ACCELERATE_USE_CPU") or cuda.device_count() == 0:
        return
    rank, size = int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = own_gpus(gpus_per_process, local_rank=rank, local_world_size=size, n_gpus=cuda.device_count())
    environ["ACCELERATE_TORCH_DEVICE"] = str(gpus[0])
    cuda.set_device(gpus[0])


def own_gpus(
    gpus_per_process: int, *, local_rank: int = 0, local_world_size: int = 1, n_gpus: int | None = None
) -> list[torch.device]:
    """The GPUs of this process, none on the CPU; a process that is alone on its machine has all that it sees.

    local_rank, local_world_size: its number among the processes of its machine, and their number. n_gpus: those that
    it sees, None = found out. Raises ValueError if there are fewer than asked for.
    """
    if n_gpus is None:
        n_gpus = 0 if is_set("ACCELERATE_USE_CPU") else torch.cuda.device_count()
    if n_gpus == 0:
        return []
    if gpus_per_process == 1:
        mine = range(n_gpus) if local_world_size == 1 else [local_rank % n_gpus]
        return [torch.device("cuda", gpu) for gpu in mine]
    if (needed := gpus_per_process * local_world_size) > n_gpus:
        raise ValueError(
            f"distributed.gpus_per_process: {local_world_size} processes with {gpus_per_process} GPUs each need "
            f"{needed}, and each of them sees {n_gpus}: start fewer processes, or let each see all GPUs of its machine"
        )
    return [torch.device("cuda", local_rank * gpus_per_process + gpu) for gpu in range(gpus_per_process)]


def check(config: Config, strategy: str, gpus: Sequence[torch.device]) -> None:
    """Raises ValueError for keys about the place of models that contradict each other, the strategy or the machine."""
    args, each = config.alg.policy.args, config.distributed.gpus_per_process
    key = "alg.policy.args.device_map"
    if strategy not in PLAIN and (args.device_map is not None or each > 1):
        name = key if args.device_map is not None else "distributed.gpus_per_process"
        raise ValueError(f"{name}: {strategy} spreads the weights by itself over one GPU a process; leave the key out")
    if each > 1 and wanted(config) is None:
        raise ValueError(
            f"distributed.gpus_per_process is {each}, and nothing says how to use them: set {key} to balanced, or "
            "leave this key out and start more processes"
        )
    if isinstance(args.device_map, dict) and not gpus:
        raise ValueError(f"{key} names GPUs, and this process runs on the CPU; leave it out")
    if args.max_memory is not None and not isinstance(wanted(config), str):
        raise ValueError(f"alg.policy.args.max_memory is for {key} auto, balanced or sequential; leave it out")
    check_frozen(args, strategy)


def wanted(config: Config) -> str | dict[str, Any] | None:
    """The device map that the configuration asks for, or None."""
    args = config.alg.policy.args
    return args.device_map if args.device_map is not None else "balanced" if args.apply_model_parallel else None


def spread(
    config: Config,
    actor_critic: ActorCritic,
    frozen: Mapping[str, LanguageModel],
    gpus: Sequence[torch.device],
    broadcast: Callable[[Any], Any] = lambda item: item,
) -> bool:
    """Puts policy, critic, value head and frozen models on the GPUs of this process; False if no map is in force.

    Comes before the optimizer: a weight that moves is a new object. broadcast: process 0's object on all, whose plan
    they share, as DDP's buckets need it. Raises ValueError if the models do not fit.
    """
    asked = wanted(config)
    if asked is None:
        return False
    if len(gpus) < 2 and not isinstance(asked, dict):
        where = "one GPU" if gpus else "the CPU"
        _say(f"device_map {asked}: this process has {where}, so its models stay together")
        return False
    small = {name: model for name, model in frozen.items() if is_quantized(model)}
    models: dict[str, PreTrainedModel] = {name: model.lm for name, model in frozen.items() if name not in small}
    if actor_critic.critic is not None:
        models["critic"] = actor_critic.critic
    policy = actor_critic.policy.lm
    room = capacity(config, gpus)
    room[0] -= sum(map(device_maps.weight_bytes, small.values()))
    maps = broadcast(device_maps.plan(asked, policy, models, room))
    for line in device_maps.describe(maps, {"policy": policy, **models}, len(gpus)):
        _say(line)
    for name, model in {"policy": policy, **models}.items():
        dispatch(model, {module: gpus[gpu] for module, gpu in maps[name].items()}, gpus[0])
    for module in (actor_critic.value_head, *small.values()):
        if module is not None:
            module.to(gpus[0])
    return True


def capacity(config: Config, gpus: Sequence[torch.device]) -> list[int]:
    """Bytes that may be filled on each GPU: those of max_memory, else a share of what is free."""
    limits = config.alg.policy.args.max_memory
    if limits is not None:
        return device_maps.budgets(limits, len(gpus))
    return [int(device_maps.FREE_SHARE * torch.cuda.mem_get_info(gpu)[0]) for gpu in gpus]


def dispatch(
    model: PreTrainedModel,
    device_map: Mapping[str, torch.device],
    main_device: torch.device,
) -> None:
    """Moves the modules of a model to their devices, in place, and lets inputs follow from one to the next.

    Whatever is called from outside (see `_doors`) takes its inputs from anywhere and gives outputs on main_device.
    """
    places = {name: str(device) for name, device in device_map.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys do not match")  # those of single tensors
        dispatch_model(
            model,
            places,
            main_device=str(main_device),
            skip_keys=list(model._skip_keys_device_placement or []),
            force_hooks=True,  # also where all is on one device: it may be another than the inputs'
        )
    # accelerate refuses to train what has this mark with several processes; here DDP is told what it needs to know.
    del model.hf_device_map
    model.spread_over = places
    for door in _doors(model):
        door.register_forward_hook(partial(_bring_back, main_device))


def _doors(model: PreTrainedModel) -> list[nn.Module]:
    """The parts of a model that `algorithms` calls by themselves."""
    parts = [model.base_model, model.get_output_embeddings()]
    if model.config.is_encoder_decoder:
        parts += [model.get_encoder(), model.get_decoder()]
    return [part for part in {id(part): part for part in parts}.values() if part is not None and part is not model]


def _bring_back(device: torch.device, _module: nn.Module, _args: Any, output: Any) -> Any:
    return send_to_device(output, device, skip_keys=["cache", "past_key_values"])


def is_spread(model: nn.Module) -> bool:
    """Whether a device map is in force in the model."""
    return any(hasattr(module, "spread_over") for module in model.modules())


def wrap_data_parallel(model: nn.Module) -> nn.Module:
    """A spread model that averages its gradients with the other processes; it must be spread alike in all of them."""
    return DistributedDataParallel(model, device_ids=None)


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {line}", flush=True)
