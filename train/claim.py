"""Taking a run's folder: one run at a time, nothing deleted before the new run stands."""

import contextlib
import errno
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from train import checkpoint
from train.config import Config
from train.distributed import Ranks

MARK = "config.json"
Find = Callable[[Path, Config, Ranks], Path]


def find_checkpoint(folder: Path, config: Config, ranks: Ranks) -> Path:
    """The checkpoint of a reinforcement learning run in `folder` that --resume asks for.

    Raises FileNotFoundError if there is none, ValueError if it is of another configuration or number of ranks.
    """
    found = checkpoint.find(folder / "checkpoints", str(config.run.resume))
    checkpoint.check(found, config, ranks)
    return found


@contextlib.contextmanager
def claimed(
    folder: Path, config: Config, ranks: Ranks, stack: contextlib.ExitStack, find: Find = find_checkpoint
) -> Iterator[Path | None]:
    """Makes the folder this run's; yields the checkpoint to resume from, or None for a fresh run.

    Raises ValueError if it holds another run and neither --resume nor --overwrite was given, if a process is running in
    it, or if the checkpoint is of another configuration; FileNotFoundError if there is nothing to resume. If the
    context fails everything is as before, what --overwrite was to delete included. The folder is locked until
    `stack` closes. `find` is `find_checkpoint` for the kind of run; rank 0 alone calls it.
    """
    found, problem = None, None
    replaced = folder.with_name(f".replaced_{folder.name}")
    if ranks.is_main:
        try:
            found = _claim(folder, replaced, config, ranks, stack, find)
        except Exception as error:  # the other ranks wait: they have to stop too
            problem = error
    found, failed = ranks.broadcast((found, problem is not None))
    if failed:
        raise problem or RuntimeError("rank 0 could not take the run's folder; its message says why")
    try:
        yield found
    except BaseException:
        if found is None and ranks.is_main:
            (folder / MARK).unlink(missing_ok=True)
            if replaced.exists():
                shutil.rmtree(folder)
                replaced.rename(folder)
        raise
    if ranks.is_main:
        shutil.rmtree(replaced, ignore_errors=True)
        (folder / MARK).write_text(json.dumps(config.to_dict(), indent=1), "utf-8")


def _claim(
    folder: Path, replaced: Path, config: Config, ranks: Ranks, stack: contextlib.ExitStack, find: Find
) -> Path | None:
    """The checkpoint to resume from; or None, and the mark makes the folder this run's."""
    if config.run.resume not in (None, "never"):
        if config.run.overwrite:
            raise ValueError("--resume goes on with the run in the folder, --overwrite deletes it: give one of them")
        found = find(folder, config, ranks)
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(folder))
        return found
    if config.run.overwrite and folder.exists() and any(folder.iterdir()):
        if not is_run(folder):
            raise ValueError(f"{folder} is not the folder of a run, so --overwrite leaves it alone")
        with locked(folder):
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(locked(folder))
    try:
        with (folder / MARK).open("x", encoding="utf-8") as file:
            json.dump(config.to_dict(), file, indent=1)
    except FileExistsError as error:
        raise ValueError(
            f"{folder} holds another run: give --resume, --overwrite, or another tracking.experiment_name"
        ) from error
    return None


def is_run(folder: Path) -> bool:
    """Whether the folder is a run's, or one that a failed start has left; not, say, a model's with its config.json."""
    try:
        return {"alg", "train_evaluation"} <= json.loads((folder / MARK).read_text("utf-8")).keys()
    except FileNotFoundError:
        return {path.name for path in folder.iterdir()} <= {".lock", "data", "tensorboard"}
    except (ValueError, AttributeError):
        return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Holds the folder's lock. Raises ValueError if another process does. It is released when the process ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(f"another process is running in {folder}") from error
            # A file system without locks: then two runs at once are the user's care.
        yield file
