"""The command line of every training script: --config FILE, a few flags, and --dotted.path=value for each key."""

import textwrap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from train.config_loader import Document, parse_yaml, unknown
from train.config_types import keys

# Short names, the last four of them RL4LMs'.
ALIASES = {
    "output_dir": "tracking.output_dir",
    "project_name": "tracking.project_name",
    "experiment_name": "tracking.experiment_name",
    "base_path_to_store_results": "tracking.output_dir",
}
FLAGS = ("config", "config_path", "resume", "overwrite", "init_from", "help")
USAGE = """\
usage: SCRIPT --config FILE [--resume [auto|never|CHECKPOINT]] [--overwrite] [--SECTION.KEY=VALUE ...]

  --config FILE       the run's YAML file (--config_path is the same)
  --resume [WHAT]     auto: go on from the newest checkpoint of the run folder (meant where WHAT is left out);
                      never: do not; else the path of a checkpoint
  --overwrite         start anew in a run folder that holds another run
  --init_from FOLDER  start from the weights of another run's checkpoint, whatever its strategy and number of ranks:
                      those of policy and critic; optimizer, iteration and the KL coefficient begin anew
  --output_dir DIR, --project_name NAME, --experiment_name NAME
                      short for --tracking.output_dir and so on
  --help              show this

Every key of the YAML file can be given as --SECTION.KEY=VALUE or --SECTION.KEY VALUE. VALUE is read as YAML:
--env.n_envs=4, --alg.args.target_kl=null, --reward_fn.args.min_tokens=20,
--train_evaluation.metrics='[{id: dates}]'. The last one wins.
"""


@dataclass
class Arguments:
    """What a command line says; `overrides` are pairs of dotted path and YAML text."""

    config: str = ""
    resume: str | None = None
    overwrite: bool = False
    init_from: str | None = None
    help: bool = False
    overrides: list[tuple[str, str]] = field(default_factory=list)


def parse_args(argv: Sequence[str], cls: type) -> Arguments:
    """Take a command line apart. Raises ValueError for what is no option of a config tree `cls`."""
    result, queue = Arguments(), deque("--help" if arg == "-h" else arg for arg in argv)
    top = {key.path.partition(".")[0] for key in keys(cls)}
    while queue:
        option = queue.popleft()
        if not option.startswith("--"):
            raise ValueError(f"unexpected argument {option!r}; overrides are written --section.key=value")
        name, given, value = option[2:].partition("=")
        name = ALIASES.get(name, name)
        if name in ("overwrite", "help"):
            if given:
                raise ValueError(f"--{name} takes no value")
            setattr(result, name, True)
            continue
        if not given and queue and not queue[0].startswith("--"):
            given, value = "=", queue.popleft()
        if name == "resume":
            result.resume = value or "auto"
        elif not given:
            raise ValueError(f"--{name} needs a value: --{name}=...")
        elif name in ("config", "config_path", "init_from"):
            setattr(result, name.removesuffix("_path"), value)
        elif "." in name or name in top:
            result.overrides.append((name, value))
        else:
            raise ValueError(_unknown_option(name, cls))
    return result


def _unknown_option(name: str, cls: type) -> str:
    paths = [key.path for key in keys(cls)]
    ends = [path for path in paths if path.endswith(f".{name}")]
    if ends:
        return f"unknown option '--{name}'; did you mean --{ends[0]}?"
    sections = dict.fromkeys(path.partition(".")[0] for path in paths)
    return unknown("option", f"--{name}", [f"--{known}" for known in (*FLAGS, *ALIASES, *sections)])


def apply_overrides(document: Document, overrides: Sequence[tuple[str, str]]) -> None:
    """Put overrides into the tree of a file, in place. Raises ValueError for a path through something else."""
    for path, text in overrides:
        source = f"command line, --{path}"
        override = parse_yaml(text, source, path, lines=False)
        parent, key = _section(document.data, path, source)
        parent[key] = override.data
        for table in (document.places, document.texts, document.problems):
            for old in [at for at in table if at == path or at.startswith((f"{path}.", f"{path}["))]:
                del table[old]
        document.places |= override.places
        document.texts |= override.texts
        document.problems |= override.problems


def _section(tree: dict[str, Any], path: str, source: str) -> tuple[dict[str, Any], str]:
    *parents, key = path.split(".")
    for i, name in enumerate(parents):
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ValueError(f"{source}: {'.'.join(parents[: i + 1])} is no section; set it as a whole")
    return tree, key


def help_text(cls: type, algorithm: str | None = None) -> str:
    """All options, with type, default and docstring of each key, section by section; those of one algorithm, or of all
    with what they share once."""
    lines = [USAGE if algorithm is None else USAGE.replace("SCRIPT", f"python -m train.{algorithm}")]
    shown = dict.fromkeys(keys(cls, only=algorithm))
    for (section, doc), group in groupby(shown, lambda key: (key.section, key.section_doc)):
        lines.append(f"{section}: {doc}")
        for key in group:
            lines.append(f"  --{key.path}  ({key.kind}; {key.default})")
            lines += textwrap.wrap(key.doc, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    return "\n".join(lines)
