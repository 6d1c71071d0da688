"""Proposes strategy and sizes for a run: from plans, and from a short look at this machine where that is the one."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.plan_machine import Machine, choose, config_file, gib, this_machine
from tools.plan_probe import Probe, probe
from tools.plan_report import as_json, show
from tools.plan_result import make_plan
from tools.plan_sizes import ROOM, Advice, choose_sizes, cores, environments, limits, powers
from train.config import Config, RLAlg, load_config

_ONE_GPU = (
    ("single", "everything fits on the GPU"),
    ("zero3_offload", "all but the optimizer fits on the GPU"),
    ("zero3_offload_params", "weights and optimizer wait in the machine's memory"),
)
_GPUS = (
    ("ddp", "everything fits on each GPU, and nothing is faster than copies"),
    ("zero1", "copies do not fit; without the optimizer's state they do"),
    ("zero2", "copies do not fit; without optimizer and gradients they do"),
    ("zero3", "the weights have to be shared as well"),
    ("zero3_offload", "the shares do not fit with the optimizer"),
    ("zero3_offload_params", "nothing else fits"),
)


def suggest(argv: Sequence[str], machine: Machine, options: dict[str, Any], console: Console, out: Path | None) -> int:
    """Prints the plan and the command to paste, with reasons; 1 if nothing fits.

    options: strategy, processes and bf16 as given, or None. Raises ValueError for supervised training.
    """
    config = load_config(argv)
    if not isinstance(config.alg, RLAlg):
        raise ValueError("--suggest is for reinforcement learning; of supervised training there is the plan alone")
    with console.status("planning"):
        advice = pick_strategy(argv, machine, options)
        most = limits(argv, machine, advice) if advice else (0, 0)
    if advice is None:
        console.print("no strategy fits, even with gradient checkpointing and one episode at a time", highlight=False)
        return 1
    choose_sizes(config, advice, _measured(argv, machine, advice, most, console), most)
    with console.status("planning"):
        advice.plan = make_plan(load_config([*argv, *advice.words()]), advice.plan.setting, machine)
    show(advice.plan, machine, console)
    console.print(f"\n{command(argv, config, advice)}\n", highlight=False, soft_wrap=True)
    for line in reasons(advice):
        console.print(line, highlight=False)
    if out is not None:
        suggestion = {"command": command(argv, config, advice), "overrides": advice.words(), "reasons": reasons(advice)}
        found = {**as_json(advice.plan, machine), "suggestion": suggestion}
        out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0 if advice.plan.fits else 1


def pick_strategy(argv: Sequence[str], machine: Machine, options: dict[str, Any]) -> Advice | None:
    """The simplest strategy that fits with one episode in a micro-batch. Raises ValueError if the one that was asked
    for cannot be."""
    config = load_config(argv)
    before = choose(config, machine, **options).shares
    for extra in ([], ["--alg.policy.args.gradient_checkpointing=true"]):
        for name, reason in strategies(machine, options["strategy"]):
            try:
                config = load_config([*argv, "--alg.args.micro_batch_size=1", *extra])
                setting = choose(config, machine, **{**options, "strategy": name, "processes": _number(name, options)})
                plan = make_plan(config, setting, machine)
            except ValueError:
                if options["strategy"] is not None and not extra:
                    raise
                continue
            if plan.fits and plan.worst.total("update") <= ROOM * plan.worst.capacity:
                advice = Advice(plan=plan, reason=reason, ranks=before)
                if extra:
                    advice.overrides["alg.policy.args.gradient_checkpointing"] = True, "without it nothing fits"
                return advice
    return None


def _number(strategy: str, options: dict[str, Any]) -> int | None:
    """Of processes: as given."""
    return None if strategy == "single" else options["processes"]


def strategies(machine: Machine, given: str | None) -> Sequence[tuple[str, str]]:
    """Names and reasons, the simplest first."""
    if given is not None:
        return [(given, "as asked for")]
    if machine.n_gpus:
        return _GPUS if machine.n_gpus > 1 else _ONE_GPU
    several = ("ddp", f"{cores()} cores: a process each is faster than threads in one")
    return [several, ("single", "one process fits")] if cores() > 1 else [("single", "there is one core")]


def _measured(
    argv: Sequence[str], machine: Machine, advice: Advice, most: tuple[int, int], console: Console
) -> Probe | None:
    """A probe, if the machine that is planned for is this one and the run can start here."""
    here, config = this_machine(gpus=machine.n_gpus > 0), load_config(argv)
    missing = None
    if here.n_gpus < min(1, machine.n_gpus) or abs(here.gpu_bytes - machine.gpu_bytes) > 0.1 * machine.gpu_bytes:
        missing = "these GPUs are not here"
    elif advice.plan.setting.strategy not in ("single", "ddp"):
        missing = "the run does not fit on one device"
    if missing is None:
        try:
            return probe([*argv, *advice.words()], environments(config, advice, most[0]), powers(most[1]))
        except (OSError, ValueError) as error:
            missing = f"the run cannot start here: {error}"
    console.print(f"note: nothing was measured, since {missing}; sizes are the largest that fit", highlight=False)
    return None


def command(argv: Sequence[str], config: Config, advice: Advice) -> str:
    """To paste into a shell."""
    setting = advice.plan.setting
    words = ["accelerate", "launch", "--config_file", config_file(setting)]
    if setting.processes > 1 or setting.on_gpu:
        words += ["--num_processes", str(setting.processes)]
    words += ["--mixed_precision", "bf16"] if setting.bf16 else []
    on_cpu = "" if setting.on_gpu else f"OMP_NUM_THREADS={max(1, cores() // setting.processes)} "
    if on_cpu and setting.stage is None:
        on_cpu = f"ACCELERATE_USE_CPU=true {on_cpu}"
    return on_cpu + shlex.join([*words, f"train/{config.alg.id}.py", *argv, *advice.words()])


def reasons(advice: Advice) -> list[str]:
    """A line for each choice."""
    setting, device = advice.plan.setting, advice.plan.worst
    first = f"{setting.strategy}: {advice.reason} ({gib(device.peak)} of {gib(device.capacity)})"
    return [first, *(f"{key} {value}: {why}" for key, (value, why) in advice.overrides.items())]
