"""Small runs in one launch; started by test_strategies.py under every strategy.

usage: strategies_jobs.py FOLDER STRATEGY MODELS N_ENVS JOB …
"""

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from strategies_algorithms import train_all
from strategy_runs import (
    RAGGED,
    SHARDED,
    WHOLE,
    a_run,
    families_of,
    family_of,
    fixed_scores,
    reference_of,
    several_runs_in_one_launch,
)

from train import checkpoint, ppo
from train.batches import Rollout
from train.setup import Run


class Jobs:
    """A method each, by the name of its run's folder."""

    def __init__(self, folder: Path, strategy: str, models: Path, n_envs: int) -> None:
        self.folder, self.strategy, self.n_envs = folder, strategy, n_envs
        self.model = models / family_of(strategy)

    @contextlib.contextmanager
    def run(self, name: str, *words: str, wide: bool = False, **options: Any) -> Iterator[Run]:
        model = self.model.with_name(f"{self.model.name}_wide") if wide else self.model
        changes = {"env__n_envs": self.n_envs, "tracking__experiment_name": name, **options}
        with a_run(self.folder, model, *(words or ["--overwrite"]), **changes) as run, noting_rollouts(run):
            yield run

    def whole(self) -> None:
        with self.run("whole", **WHOLE) as run:
            ppo.train(run)
            scores = fixed_scores(run)
            if run.ranks.is_main:
                torch.save(scores, run.folder / "scores.pt")

    def accumulated(self) -> None:
        for size in (1, 8):
            options = {**WHOLE, "alg__args__micro_batch_size": size, "train_evaluation__n_iters": 2}
            with self.run(f"micro_{size}", **options) as run:
                ppo.train(run)

    def gathered(self) -> None:
        for how in ("always", "auto", "never") if self.strategy in SHARDED else ("always",):
            with self.run(how, wide=True, **RAGGED, generation__gather=how) as run:
                ppo.train(run)

    def stopping(self) -> None:
        """The critic's warm-up, then iterations that stop in the middle of their updates."""
        options = {"alg__args__critic_warmup_iterations": 1, "alg__args__target_kl": 0.004, "alg__args__n_epochs": 3}
        with self.run("stopping", wide=True, **RAGGED, **options, train_evaluation__n_iters=3) as run:
            ppo.train(run)

    def poisoned(self) -> None:
        """A gradient that is not finite, from one rank's data: every rank raises, and the weights stay."""
        with self.run("poisoned", **WHOLE, alg__args__normalize_advantage=False) as run:
            batch = ppo.collect(run, 1)
            if run.ranks.rank == run.ranks.world_size - 1:
                batch.advantages[:] = torch.nan
            for iteration in (1, 2):
                run.state = replace(run.state, iteration=iteration)
                run.save()
                if iteration == 1:
                    try:
                        ppo.update(run, batch, 1)
                    except FloatingPointError as error:
                        print(f"rank {os.environ.get('RANK', '0')} says: {error}", flush=True)
                    else:
                        raise AssertionError("no FloatingPointError")

    def adapters(self) -> None:
        for name in ("merged", "adapter"):
            lora = {"alg__policy__args__lora": {"r": 4, "save_merged": name == "merged"}}
            with self.run(name, **{**WHOLE, **lora, "train_evaluation__n_iters": 1}) as run:
                ppo.train(run)
                scores = fixed_scores(run)
                if run.ranks.is_main:
                    torch.save(scores, run.folder / "scores.pt")

    def algorithms(self) -> None:
        families, alone = families_of(self.strategy), "WORLD_SIZE" not in os.environ
        train_all(self.folder, self.model.parent, self.n_envs, families, alone=alone)

    def killed_in_update(self) -> None:
        """After the first micro-batch of the third iteration."""
        with self.run("interrupted", **WHOLE) as run:
            ppo.loss = killing(self.folder, ppo.loss, lambda *_: run.state.iteration == 2)
            ppo.train(run)

    def resumed(self) -> None:
        with self.run("interrupted", "--resume", **WHOLE) as run:
            ppo.train(run)

    def killed_in_save(self) -> None:
        """While rank 0 writes the second checkpoint."""
        checkpoint.fsync = killing(self.folder, checkpoint.fsync, lambda path: ".writing_2" in str(path), rank=0)
        with self.run("half_saved", **WHOLE) as run:
            ppo.train(run)

    def killed_in_rollout(self) -> None:
        """Of the second iteration, after its first wave, the weights in parts."""
        with self.run("half_rolled", **WHOLE, generation__gather="never") as run:
            play, waves = run.sampler.envs.play, []
            run.sampler.envs.play = killing(self.folder, play, lambda _: waves.append(0) or len(waves) == 4)
            ppo.train(run)

    def refused(self) -> None:
        """To resume from the checkpoint of another strategy."""
        other = reference_of(self.strategy)
        path = self.folder.with_name(other) / "tests/whole/checkpoints/checkpoint_2"
        n_envs = {"env__n_envs": 8} if other.startswith("single") else {}
        try:
            with self.run("refused", f"--resume={path}", **WHOLE, **n_envs):
                raise AssertionError(f"resumed from {path}")
        except (ValueError, RuntimeError) as error:  # of rank 0, and of the ranks that it tells
            print(f"refused: {error}", flush=True)


def killing(folder: Path, function: Callable[..., Any], due: Callable[..., Any], rank: int = 1) -> Callable[..., Any]:
    """The function, which kills this process when it is `due`, if it is the rank's; the folder gets the time."""

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if due(*args) and os.environ["RANK"] == str(rank):
            (folder / "killed_at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return deadly


@contextlib.contextmanager
def noting_rollouts(run: Run) -> Iterator[None]:
    """Writes rollouts.jsonl: of each iteration, the prompts and responses of each rank."""
    collect = ppo.collect

    def noting(run: Run, iteration: int, *args: Any) -> Rollout:
        batch = collect(run, iteration, *args)
        masks = (batch.prompt_mask.bool(), torch.arange(batch.response_ids.shape[1]) < batch.lengths[:, None])
        texts = [
            [ids[mask].tolist() for ids, mask in zip((prompt, response), both, strict=True)]
            for prompt, response, *both in zip(batch.prompt_ids, batch.response_ids, *masks, strict=True)
        ]
        everyone = run.ranks.gather([texts])
        if run.ranks.is_main:
            with (run.folder / "rollouts.jsonl").open("a") as file:
                file.write(json.dumps({"iteration": iteration, "ranks": everyone}) + "\n")
        return batch

    ppo.collect = noting
    try:
        yield
    finally:
        ppo.collect = collect


def main(folder: str, strategy: str, models: str, n_envs: str, *jobs: str) -> None:
    several_runs_in_one_launch()
    gc.freeze()  # DeepSpeed calls the collector in each run, which would look through all modules of all libraries
    place = Jobs(Path(folder), strategy, Path(models), int(n_envs))
    for job in jobs:
        started = time.process_time()
        getattr(place, job)()
        print(f"{job}: {time.process_time() - started:.1f} CPU seconds", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
