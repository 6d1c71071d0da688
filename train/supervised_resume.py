"""Going on with a supervised run from a checkpoint of transformers' Trainer."""

import json
import os
import shutil
from pathlib import Path

import torch

from algorithms import adapters
from train import checkpoint
from train.config import Config
from train.distributed import Ranks
from train.tracking import forget_after

COMPLETE = "trainer_state.json"  # which the trainer writes last
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", adapters.WEIGHTS_FILE)


def find_checkpoint(folder: Path, config: Config, ranks: Ranks) -> Path:
    """The newest complete checkpoint of the run in `folder` for --resume auto, else the one at that path.

    Raises FileNotFoundError if there is none, ValueError if it is of another configuration or number of ranks.
    """
    resume, checkpoints = str(config.run.resume), folder / "checkpoints"
    if resume == "auto":
        saved = [path.parent for path in checkpoints.glob(f"checkpoint-*/{COMPLETE}")]
        if not saved:
            raise FileNotFoundError(f"--resume: there is no checkpoint in {checkpoints}; leave it out to start anew")
        found = max(saved, key=step_of)
    elif not ((found := Path(resume)) / COMPLETE).is_file():
        raise FileNotFoundError(f"--resume {resume}: there is no checkpoint (a folder checkpoint-N with {COMPLETE})")
    checkpoint.check(found.parent, config, ranks)
    return found


def first_weights(config: Config) -> str:
    """The model that the run begins with: alg.model_name, or what --init_from means.

    That is a model or checkpoint, or the model that came out of a run, or else the newest checkpoint in its folder.
    Raises FileNotFoundError if there is none.
    """
    if config.run.init_from is None:
        return str(config.alg.model_name)
    folder = Path(config.run.init_from)
    saved = [path.parent for pattern in ("", "*/") for path in folder.glob(f"{pattern}checkpoint-*/{COMPLETE}")]
    for path in (folder, folder / "model", *sorted(saved, key=step_of)[-1:]):
        if any((path / name).is_file() for name in WEIGHTS):
            return str(path)
    raise FileNotFoundError(f"--init_from {folder}: neither a model nor a checkpoint nor the folder of a run with one")


def step_of(path: Path) -> int:
    """The optimizer step of a folder checkpoint-N."""
    return int(path.name.rpartition("-")[2])


def describe(folder: Path, config: Config, ranks: Ranks, data: str) -> None:
    """Writes down what a run that resumes from this one's checkpoints has to be like: see `checkpoint.check`."""
    described = {
        "world_size": ranks.world_size,
        "strategy": ranks.strategy.name,
        "config": config.to_dict(),
        "data": data,
        "torch": torch.__version__,
    }
    path = folder / "checkpoints" / "state.json"
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(described, indent=1), "utf-8")
    os.replace(aside, path)


def go_back(folder: Path, found: Path) -> None:
    """Makes the run's files what they were at a checkpoint: later lines and checkpoints are of a run that ended."""
    forget_after(folder, step_of(found))
    for path in (folder / "checkpoints").glob("checkpoint-*"):
        if step_of(path) > step_of(found):
            shutil.rmtree(path)
