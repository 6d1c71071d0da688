"""Going on with a supervised run from a checkpoint of transformers' Trainer."""

import json
import os
import shutil
from pathlib import Path

import torch

from train import checkpoint
from train.config import Config
from train.distributed import Ranks
from train.tracking import forget_after


def find_checkpoint(folder: Path, config: Config, ranks: Ranks) -> Path:
    """The newest complete checkpoint of the run in `folder` for --resume auto, else the one at that path.

    Raises FileNotFoundError if there is none, ValueError if it is of another configuration or number of ranks.
    """
    resume, checkpoints = str(config.run.resume), folder / "checkpoints"
    complete = "trainer_state.json"  # which the trainer writes last
    if resume == "auto":
        saved = [path.parent for path in checkpoints.glob(f"checkpoint-*/{complete}")]
        if not saved:
            raise FileNotFoundError(f"--resume: there is no checkpoint in {checkpoints}; leave it out to start anew")
        found = max(saved, key=step_of)
    elif not ((found := Path(resume)) / complete).is_file():
        raise FileNotFoundError(f"--resume {resume}: there is no checkpoint (a folder checkpoint-N with {complete})")
    checkpoint.check(found.parent, config, ranks)
    return found


def step_of(path: Path) -> int:
    """The optimizer step of a folder checkpoint-N."""
    return int(path.name.rpartition("-")[2])


def describe(folder: Path, config: Config, ranks: Ranks, data: str) -> None:
    """Writes down what a run that resumes from this one's checkpoints has to be like: see `checkpoint.check`."""
    described = {"world_size": ranks.world_size, "config": config.to_dict(), "data": data, "torch": torch.__version__}
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
