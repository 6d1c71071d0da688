"""Plan a run's memory before it starts, on this machine or on GPUs that are not here.

    python -m tools.plan --config FILE                                       # this machine
    python -m tools.plan --config FILE --gpus 8x80GB --strategy zero3 --mixed_precision bf16 --alg.args.n_steps=64
    python -m tools.plan --config FILE --gpus 4x24GiB --suggest

Only the model's config.json is needed. The run's own code goes through an iteration on tensors that have shapes and no
numbers, and what it would hold is counted: weights, gradients, optimizer, activations, caches, by phase. Prompts and
responses count with their longest length. For CPUs, the C library's allocator is asked for the same blocks, without
touching them, because what it loses between them may be a third of a process.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from tools.plan_machine import STRATEGIES, Machine, choose, parse_machine
from tools.plan_remedies import remedies, say
from tools.plan_report import as_json, show
from tools.plan_result import Plan, make_plan
from train.config import load_config
from train.script import run_script


def plan(
    argv: Sequence[str],
    machine: Machine,
    strategy: str | None = None,
    processes: int | None = None,
    bf16: bool = False,
) -> Plan:
    """The plan of the run that a command line asks for. Raises ValueError for what cannot be."""
    config = load_config(argv)
    return make_plan(config, choose(config, machine, strategy, processes, bf16), machine)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m tools.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --config FILE [--SECTION.KEY=VALUE ...] [options]",
        allow_abbrev=False,
    )
    p.add_argument("--gpus", help="as 8x80GB or 4x24GiB, or cpu; without it: this machine")
    p.add_argument("--strategy", help=f"one of {', '.join(STRATEGIES)}; without it: copies on all GPUs")
    p.add_argument("--num_processes", type=int, help="of the launch; without it: one for each GPU, 2 on CPUs")
    p.add_argument("--mixed_precision", choices=("no", "bf16"), default="no", help="as accelerate launch takes it")
    p.add_argument("--json", type=Path, metavar="FILE", help="write all numbers, in bytes")
    p.add_argument(
        "--suggest",
        action="store_true",
        help="propose strategy, environments, workers and micro-batches: from the plan and, where the model can be run "
        "on this machine, a minute of measuring",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; 1 if it does not fit."""
    given, rest = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    set_verbosity_error()
    disable_progress_bar()
    console, machine = Console(width=None if sys.stdout.isatty() else 120), parse_machine(given.gpus)
    options: dict[str, Any] = {"strategy": given.strategy, "processes": given.num_processes}
    options["bf16"] = given.mixed_precision == "bf16"
    if given.suggest:
        from tools.plan_suggest import suggest

        return suggest(rest, machine, options, console, given.json)
    found = plan(rest, machine, **options)
    show(found, machine, console)
    cures = [] if found.fits else remedies(rest, machine, found, console)
    for cure in cures:
        console.print(say(cure), highlight=False)
    if not found.fits and not cures:
        console.print(
            "nothing that was tried makes it fit: take more or larger GPUs, or a smaller model", highlight=False
        )
    if given.json:
        given.json.write_text(json.dumps(as_json(found, machine, cures), indent=1) + "\n", "utf-8")
    return 0 if found.fits else 1


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
