"""The machine that is planned for, and which strategies are possible on it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from tools.plan_layout import DEEPSPEED, Setting
from tools.plan_models import architecture
from train.config import Config, RLAlg, SupervisedAlg, TRPOAlg
from train.config_loader import unknown
from train.placement import PLAIN, check, wanted

STRATEGIES = ("single", "ddp", *DEEPSPEED, "fsdp2", "tensor_parallel", "device_map")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """n_gpus: 0 for CPUs alone. gpu_bytes: of each. host_bytes: of its main memory, None if that is not known."""

    n_gpus: int
    gpu_bytes: float = 0.0
    host_bytes: float | None = None

    @property
    def name(self) -> str:
        """For people."""
        if not self.n_gpus:
            return f"CPUs, {gib(self.host_bytes or 0)}"
        return f"{self.n_gpus} GPU{'s' if self.n_gpus > 1 else ''} with {gib(self.gpu_bytes)} each"


def gib(n: float) -> str:
    """Bytes for people."""
    return f"{n / 2**30:,.2f} GiB" if n < 100 * 2**30 else f"{n / 2**30:,.0f} GiB"


def this_machine(*, gpus: bool = True) -> Machine:
    """What is here. gpus: those too."""
    memory = float(psutil.virtual_memory().total)
    if gpus and torch.cuda.is_available():
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        return Machine(n_gpus=len(sizes), gpu_bytes=float(min(sizes)), host_bytes=memory)
    return Machine(n_gpus=0, host_bytes=memory)


def parse_machine(text: str | None) -> Machine:
    """From `--gpus`: None is this machine, "cpu" its CPUs, else number and size. Raises ValueError for what is none."""
    if text is None or text.lower() == "cpu":
        return this_machine(gpus=text is None)
    match = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?([\d.]+)\s*([a-z]+)", text.strip(), re.IGNORECASE)
    unit = _UNITS.get(match[3].upper()) if match else None
    if match is None or unit is None or match[2].count(".") > 1 or (count := int(match[1] or 1)) < 1:
        raise ValueError(f"--gpus {text!r}: write how many GPUs of which size, as 8x80GB or 4x24GiB, or cpu")
    return Machine(n_gpus=count, gpu_bytes=float(match[2]) * unit)


def default_strategy(config: Config, machine: Machine) -> str:
    """What the machine's devices suggest: copies on all GPUs, unless the configuration has a device map."""
    if isinstance(config.alg, RLAlg) and wanted(config) is not None and machine.n_gpus > 1:
        return "device_map"
    return "ddp" if machine.n_gpus > 1 else "single"


def choose(
    config: Config, machine: Machine, strategy: str | None = None, processes: int | None = None, bf16: bool = False
) -> Setting:
    """The setting of a plan. Raises ValueError for a strategy that there is not, or that cannot be here."""
    name = strategy or default_strategy(config, machine)
    if name not in STRATEGIES:
        raise ValueError(f"--strategy: {unknown('strategy', name, STRATEGIES)}")
    if name == "single" and (processes or 1) > 1:
        raise ValueError(f"--num_processes {processes}: strategy single is one process; take ddp, or leave it out")
    n = processes or _processes(config, name, machine)
    capacity = machine.gpu_bytes if machine.n_gpus else (machine.host_bytes or 0.0) / n
    setting = Setting(strategy=name, processes=n, on_gpu=machine.n_gpus > 0, bf16=bf16, capacity=capacity)
    _check_devices(config, setting, machine)
    _check_models(config, setting)
    return setting


def _processes(config: Config, strategy: str, machine: Machine) -> int:
    if strategy == "single":
        return 1
    if strategy == "device_map":
        return max(1, machine.n_gpus // gpus_of_each(config, machine))
    return machine.n_gpus or 2


def gpus_of_each(config: Config, machine: Machine) -> int:
    """GPUs of a process with a device map: gpus_per_process, or all."""
    each = config.distributed.gpus_per_process
    return each if each > 1 else max(1, machine.n_gpus)


def _check_devices(config: Config, setting: Setting, machine: Machine) -> None:
    if setting.strategy == "device_map":
        if machine.n_gpus < 2:
            raise ValueError(
                "strategy device_map spreads models over several GPUs of a process: --gpus has to give them"
            )
        each = gpus_of_each(config, machine)
        if setting.processes * each > machine.n_gpus:
            raise ValueError(
                f"strategy device_map: {setting.processes} processes with {each} GPUs each need "
                f"{setting.processes * each}, and --gpus gives {machine.n_gpus}; set distributed.gpus_per_process to "
                f"{max(1, machine.n_gpus // setting.processes)}, or --num_processes to {machine.n_gpus // each}"
            )
    elif 0 < machine.n_gpus < setting.processes:
        raise ValueError(f"--num_processes {setting.processes}: --gpus gives {machine.n_gpus}, and each needs one")


def _check_models(config: Config, setting: Setting) -> None:
    name = setting.strategy
    if isinstance(config.alg, SupervisedAlg) and name in ("tensor_parallel", "device_map"):
        raise ValueError(f"strategy {name} is not for supervised training: fsdp2 and zero3 spread any model")
    if name == "zero0" and setting.bf16:
        raise ValueError("bf16 under ZeRO-0 drifts, and is refused: take zero1, or ddp")
    if isinstance(config.alg, RLAlg):
        plain = PLAIN[setting.processes > 1] if name in ("single", "ddp", "device_map") else name
        some = [torch.device("cuda", 0), torch.device("cuda", 1)] if setting.on_gpu else []
        check(config, "zero3" if plain.startswith("zero3") else plain, some)
        if setting.stage is not None and config.alg.policy.args.dtype != "float32":
            raise ValueError(
                "alg.policy.args.dtype must be float32 under DeepSpeed, which keeps its own copy of the weights: for "
                "bfloat16 give --mixed_precision bf16"
            )
    if name == "tensor_parallel":
        _check_tensor_parallel(config, setting.processes)


def _check_tensor_parallel(config: Config, n: int) -> None:
    if isinstance(config.alg, TRPOAlg):
        raise ValueError("TRPO's step needs the policy's weights whole in each process: take ddp, fsdp2 or zero3")
    text = architecture(config).get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"strategy tensor_parallel: transformers has no plan for {text.model_type} (base_model_tp_plan), as it has "
            "for llama and qwen2; fsdp2, zero3 and device_map spread any model over several GPUs"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, key, None)) is not None and heads % n:
            raise ValueError(f"strategy tensor_parallel: {key} is {heads}, which {n} processes cannot share")


def with_processes(setting: Setting, n: int) -> Setting:
    """The same with another number of processes."""
    return replace(setting, processes=n)


def config_file(setting: Setting) -> str:
    """Of accelerate_configs/, for `accelerate launch`."""
    names: dict[str, Sequence[str]] = {
        "single": ("cpu", "single_gpu"),
        "ddp": ("ddp_cpu", "ddp"),
        "zero0": ("zero1",) * 2,
    }
    return f"accelerate_configs/{names.get(setting.strategy, (setting.strategy,) * 2)[setting.on_gpu]}.yaml"
