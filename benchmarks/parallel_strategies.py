"""The same PPO job under every parallel strategy: tokens/s by phase, scaling, memory per rank, time lost in waiting.

    python -m benchmarks.parallel_strategies                      # the studies of benchmarks/parallel_cases.py
    python -m benchmarks.parallel_strategies --quick              # four cases of a tiny model
    python -m benchmarks.parallel_strategies --strategies ddp zero3 --ranks 2 4 --models small --n_envs 8 16

Policy, critic, reference and a learned reward, all of the same size; two epochs of one optimizer step; a checkpoint
after every iteration. Each case is an `accelerate launch`; its first iteration warms up, and the numbers are medians of
the others. A case that fails is a row with the reason. What was finished before in --runs is not run again. Writes
table.md, results.csv, results.json and a picture per study. On GPUs: --gpu, and --models FOLDER_OR_NAME for real ones.

Measure on a machine that does nothing else: the table's others' cores says how many were busy with something else.
"""

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.parallel_cases import QUICK, ROOT, STRATEGIES, STUDIES, Case, Study, product
from benchmarks.parallel_report import write
from benchmarks.parallel_runs import Row, run_case

# option: (axis of Case, type, help)
AXES = {
    "strategies": ("strategy", str, f"of {', '.join(STRATEGIES)}"),
    "ranks": ("ranks", int, "processes"),
    "models": ("model", str, "tiny, small, medium (random Llamas, made here), or a model's folder or hub name"),
    "n_envs": ("n_envs", int, "environments per rank"),
    "waves": ("waves", int, "episodes per environment and iteration"),
    "response": ("response", int, "tokens of a response"),
    "accumulation": ("accumulation", int, "micro-batches per optimizer step, of the same batch"),
    "threads": ("threads", int, "per rank"),
    "precision": ("precision", str, "no or bf16"),
    "prompt": ("prompt", int, "tokens of a prompt"),
    "iterations": ("iterations", int, "per case, the first of which warms up"),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.parallel_strategies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--quick", action="store_true", help="four cases of a tiny model instead of the studies")
    p.add_argument("--studies", nargs="+", choices=list(STUDIES), default=list(STUDIES), help="which of them (all)")
    axes = p.add_argument_group("instead of the studies, all combinations of", "what is not given is as in Case()")
    for option, (_, kind, text) in AXES.items():
        axes.add_argument(f"--{option}", nargs="+", type=kind, help=text)
    axes.add_argument("--ragged", action="store_true", help="responses of different lengths")
    p.add_argument("--gpu", action="store_true", help="the files of accelerate_configs/ for GPUs")
    p.add_argument("--launch", default="", help='more options of accelerate launch, in quotes: "--num_machines 2 …"')
    p.add_argument("--timeout", type=float, default=300, help="of a case, in seconds (300)")
    p.add_argument("--most_scatter", type=float, default=0.25, help="of iterations, before a case is repeated (0.25)")
    p.add_argument("--again", action="store_true", help="run finished cases again")
    p.add_argument("--list", action="store_true", help="show the cases and run nothing")
    p.add_argument("--runs", type=Path, default=ROOT / "runs" / "parallel_strategies", help="folder of the runs")
    p.add_argument("--out", type=Path, help="folder of the results (results/ in --runs)")
    return p


def studies_of(args: argparse.Namespace) -> dict[str, Study]:
    """What the command line asks for."""
    given = {axis: getattr(args, option) for option, (axis, *_) in AXES.items() if getattr(args, option) is not None}
    if unknown := set(given.get("strategy", ())) - set(STRATEGIES):
        raise SystemExit(f"--strategies: {', '.join(sorted(unknown))} is not one of {', '.join(STRATEGIES)}")
    if args.ragged:
        given["ragged"] = [True]
    if given:
        return {"chosen": Study("The chosen cases", product(**given))}
    return {"quick": QUICK} if args.quick else {name: STUDIES[name] for name in args.studies}


def run(cases: Sequence[Case], args: argparse.Namespace) -> dict[Case, Row]:
    """The cases one after another, with a progress bar."""
    rows: dict[Case, Row] = {}
    with tqdm(cases, unit="case", dynamic_ncols=True) as bar:
        for case in bar:
            bar.set_postfix_str(case.name)
            rows[case] = run_case(
                case,
                args.runs.resolve(),
                gpu=args.gpu,
                options=shlex.split(args.launch),
                timeout=args.timeout,
                most_scatter=args.most_scatter,
                again=args.again,
            )
            if rows[case]["failed"]:
                bar.write(f"{case.name}: {rows[case]['failed']}")
    return rows


def report(studies: Mapping[str, Study], rows: dict[Case, Row], args: argparse.Namespace) -> None:
    options = {name: value for name, value in vars(args).items() if value is not None and name not in ("runs", "out")}
    print(write(studies, rows, options, args.out or args.runs / "results"))


def main(argv: list[str] | None = None) -> None:
    """Runs what was asked for and reports it."""
    args = parser().parse_args(argv)
    studies = studies_of(args)
    cases = list(dict.fromkeys(case for study in studies.values() for case in study.cases))
    if args.list:
        print(*(case.name for case in cases), f"{len(cases)} cases", sep="\n")
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    report(studies, run(cases, args), args)


if __name__ == "__main__":
    main()
