"""Saving and resuming a run. A checkpoint is a folder that appears complete or not at all."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from algorithms import adapters
from train.distributed import Ranks


@dataclass(kw_only=True)
class State:
    """All that an iteration leaves to the next one beside model and optimizer.

    Random numbers are functions of (seed, purpose, iteration, environment), so `iteration` is the state of all streams;
    episodes never last longer than an iteration, so environments have none.
    """

    iteration: int = 0
    kl_coef: float = 0.0
    best_iteration: int | None = None
    best_value: float | None = None


def folder_of(checkpoints: Path, iteration: int) -> Path:
    return checkpoints / f"checkpoint_{iteration}"


def saved_iterations(checkpoints: Path) -> list[int]:
    """Iterations that have a complete checkpoint, oldest first."""
    numbers = (path.name.removeprefix("checkpoint_") for path in checkpoints.glob("checkpoint_*") if path.is_dir())
    return sorted(int(number) for number in numbers if number.isdigit())


def fsync(path: Path) -> None:
    """Makes a file's or folder's content survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(
    checkpoints: Path,
    state: State,
    *,
    models: Mapping[str, torch.nn.Module],
    wrapped: tuple[Any, Any],
    sampler: Any,
    config: Mapping[str, Any],
    data: str,
    start: str,
    ranks: Ranks,
    keep_last: int,
) -> None:
    """Writes checkpoint_{iteration} aside, flushes it to disk, renames it; then removes old ones.

    models: {name: module}, each in a file of its own, whole under every strategy. wrapped: what `Ranks.prepare` made.
    Every rank calls it. Raises OSError (disk full) with earlier checkpoints untouched.
    """
    aside = checkpoints / f".writing_{state.iteration}"
    described = {"world_size": ranks.world_size, "strategy": ranks.strategy.name, "config": config, "data": data}
    described |= {"start": start, "torch": torch.__version__, "state": asdict(state)}

    def begin() -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()

    def write() -> None:
        for name, whole in states.items():
            save_file(whole, str(aside / f"{name}.safetensors"))
        torch.save({"priorities": torch.from_numpy(sampler.state_dict()["priorities"])}, aside / "sampler.pt")

    def end() -> None:
        (aside / "state.json").write_text(json.dumps(described, indent=1), "utf-8")
        _publish(aside, folder_of(checkpoints, state.iteration))
        prune(checkpoints, keep_last, state)

    try:
        on_main(ranks, begin)
        states = {name: adapters.trainable_state(model, ranks.strategy.whole) for name, model in models.items()}
        on_main(ranks, write)
        states.clear()
        ranks.strategy.save_optimizer(*wrapped, aside)
        ranks.barrier()
        on_main(ranks, end)
    except BaseException:
        if ranks.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def on_main(ranks: Ranks, action: Callable[[], None]) -> None:
    """Does it on the main process; if it fails there, the others, which would wait for ever, fail too."""
    error = None
    if ranks.is_main:
        try:
            action()
        except Exception as problem:
            error = problem
    message = ranks.broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if message is not None:
        raise OSError(f"rank 0 could not save a checkpoint: {message}")


def _publish(aside: Path, final: Path) -> None:
    """Renames a folder that is complete, once it is on the disk."""
    for path in (*aside.rglob("*"), aside):
        fsync(path)
    if final.exists():  # of the run before it was killed and resumed; renamed, since removing takes longer
        os.rename(final, final.with_name(final.name.replace("checkpoint_", ".removing_")))
    os.rename(aside, final)
    fsync(final.parent)


def prune(checkpoints: Path, keep_last: int, state: State) -> None:
    """Removes all checkpoints but the last `keep_last` and the best, and what killed runs left half done.

    Later ones than the state's go too: they are of a run from which this one went back to an earlier checkpoint.
    """
    for leftover in (*checkpoints.glob(".writing_*"), *checkpoints.glob(".removing_*")):
        shutil.rmtree(leftover, ignore_errors=True)
    saved = saved_iterations(checkpoints)
    kept = {*[iteration for iteration in saved if iteration <= state.iteration][-keep_last:], state.best_iteration}
    for iteration in saved:
        if iteration not in kept:
            # Renamed first: a removal that is interrupted must not leave half a checkpoint under a good name.
            doomed = checkpoints / f".removing_{iteration}"
            os.rename(folder_of(checkpoints, iteration), doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def find(checkpoints: Path, resume: str) -> Path:
    """The checkpoint that `--resume` means; "auto" is the newest of this run. Raises FileNotFoundError."""
    if resume != "auto":
        path = Path(resume)
        if not (path / "state.json").is_file():
            raise FileNotFoundError(
                f"--resume {resume}: there is no checkpoint (a folder checkpoint_N with state.json)"
            )
        return path
    saved = saved_iterations(checkpoints)
    if not saved:
        raise FileNotFoundError(f"--resume: there is no checkpoint in {checkpoints}; leave --resume out to start anew")
    return folder_of(checkpoints, saved[-1])


def fingerprint(model: torch.nn.Module) -> str:
    """Of the weights: a thousand of each matrix, exactly. Cheap, and sees any training."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        some = weight.detach().flatten()[:: max(1, weight.numel() // 1000)]
        digest.update(name.encode() + some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def check(path: Path, config: Any, ranks: Ranks, data: str | None = None, start: str | None = None) -> dict[str, Any]:
    """What a checkpoint says of itself. `data`, `start`: fingerprints of the samples and of the model that the run
    starts from, once they are known.

    Raises ValueError if it was written under another configuration, number of ranks, data or start, or is damaged.
    """
    try:
        described: dict[str, Any] = json.loads((path / "state.json").read_text("utf-8"))
    except ValueError as error:
        raise _damaged(path, error) from error
    if differing := config.differences(described["config"]):
        raise ValueError(f"{path} was written under another configuration; these keys differ: {', '.join(differing)}")
    for what, theirs, ours in (
        ("by {} ranks; this run has {}", described["world_size"], ranks.world_size),
        ("under the strategy {}; this run's is {}", described.get("strategy"), ranks.strategy.name),
    ):
        if theirs not in (None, ours):
            raise ValueError(
                f"{path} was written {what.format(theirs, ours)}: the optimizer's state cannot be taken over. "
                f"--init_from {path} (with another tracking.experiment_name) starts from its weights"
            )
    if data is not None and described["data"] != data:
        raise ValueError(f"{path} was written with other samples: what datapool {config.datapool.id} gives has changed")
    if start is not None and described["start"] != start:
        raise ValueError(
            f"{path} was written by a run that started from another model: what "
            f"{config.alg.policy.args.model_name} holds has changed, and with it the reference"
        )
    return described


def _damaged(path: Path, error: Exception) -> ValueError:
    others = [str(found) for n in saved_iterations(path.parent)[::-1] if (found := folder_of(path.parent, n)) != path]
    cure = f"give --resume another one of: {', '.join(others)}" if others else "there is no other one"
    return ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {cure}")


def load(
    path: Path,
    *,
    models: Mapping[str, torch.nn.Module],
    wrapped: tuple[Any, Any],
    sampler: Any,
    config: Any,
    data: str,
    start: str,
    ranks: Ranks,
) -> State:
    """Puts a checkpoint back into models, optimizer and sampler. Every rank reads. Raises ValueError as `check`."""
    described = check(path, config, ranks, data, start)
    try:
        _restore(path, models, wrapped, sampler, ranks)
        return State(**described["state"])
    except Exception as error:  # whatever a library says about a file that is cut off or overwritten
        raise _damaged(path, error) from error


def _restore(
    path: Path, models: Mapping[str, torch.nn.Module], wrapped: tuple[Any, Any], sampler: Any, ranks: Ranks
) -> None:
    # Through the CPU's memory, from where it is copied: a rank's device may be called cpu:0, which the loading
    # functions do not know.
    for name, model in models.items():
        adapters.load_trainable_state(model, load_file(str(path / f"{name}.safetensors")), ranks.strategy.put)
    ranks.strategy.load_optimizer(*wrapped, path)
    sampler.load_state_dict({"priorities": torch.load(path / "sampler.pt", weights_only=True)["priorities"].numpy()})
