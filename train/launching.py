"""How this process was started: the launcher above it, and the strategy that its accelerate config asks for."""

import os
from pathlib import Path

import psutil
import torch
import yaml

CPU_HINT = "On CPU set ACCELERATE_USE_CPU=true (see accelerate_configs/ddp_cpu.yaml)"


class LaunchError(RuntimeError):
    """The processes are not those that were asked for; the message says what to change."""


def is_set(variable: str) -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes", "on")


def requested() -> str:
    """The strategy of the accelerate config: "deepspeed", "fsdp", "tensor_parallel", or "replicated" for the others.

    Raises LaunchError for one that accelerate would silently replace by another.
    """
    if is_set("ACCELERATE_USE_DEEPSPEED"):
        if is_set("ACCELERATE_USE_CPU"):
            raise LaunchError(
                "the accelerate config asks for DeepSpeed, but ACCELERATE_USE_CPU is set, and then accelerate runs DDP "
                "instead: unset it (a machine without a GPU needs no such variable for DeepSpeed)"
            )
        return "deepspeed"
    if is_set("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise LaunchError("fsdp_version must be 2 in the accelerate config (see accelerate_configs/fsdp2.yaml)")
        return "fsdp"
    if is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return "tensor_parallel"
    return "replicated"


def has_accelerator() -> bool:
    """Whether there is a GPU, or what else torch takes for one."""
    return torch.cuda.is_available() or torch.accelerator.is_available()


def check_world(num_processes: int, counted: int) -> None:
    """Raises LaunchError unless this process is one of as many as were asked for. counted: those that answered."""
    wanted = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes != wanted:
        raise LaunchError(
            f"WORLD_SIZE is {wanted}, but this process believes that it is one of {num_processes}: each would train "
            f"alone. {CPU_HINT}"
        )
    launched = processes_asked_of_launcher()
    if launched is not None and launched > 1 and wanted == 1:
        raise LaunchError(
            f"accelerate launch was asked for {launched} processes and started one (it does so with --cpu and with "
            "MULTI_CPU): use --config_file accelerate_configs/ddp_cpu.yaml with ACCELERATE_USE_CPU=true"
        )
    if counted != num_processes:
        raise LaunchError(f"{counted} ranks answered, {num_processes} were expected")


def launcher() -> list[str] | None:
    """The words of the `accelerate launch …` that is this process' parent, if it is one."""
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    if "launch" not in words or not any("accelerate" in word for word in words[: words.index("launch")]):
        return None
    return ["accelerate", *words[words.index("launch") :]]


def processes_asked_of_launcher() -> int | None:
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
