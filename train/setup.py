"""Builds everything a run needs out of its configuration, and checks that the parts fit."""

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from algorithms import adapters
from algorithms.policy import LanguageModel
from train import checkpoint, placement, tracking
from train.claim import claimed
from train.config import Config, TRPOAlg
from train.config_types import flatten
from train.distributed import Ranks
from train.environments import make_metrics, make_sampler
from train.generation import check_generation_kwargs
from train.loading import load_tokenizer
from train.models import load_models, make_optimizer, place_models, start_from, without_gradient
from train.notices import notices
from train.placement import own_gpus
from train.rollout import Sampler


@dataclass(kw_only=True)
class Run:
    """A run on one rank: what its loop and its evaluation work with."""

    config: Config
    ranks: Ranks
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    model: Any  # ActorCritic in the strategy's wrapper
    optimizer: Any
    reference: Any  # called as a LanguageModel is
    n_weights: int  # that the optimizer trains
    start: str  # fingerprint of the policy before training
    mask_model: LanguageModel | None  # NLPO's mask policy
    sampler: Sampler
    metrics: list[Any]
    clock: tracking.Clock
    resources: tracking.Resources
    tracker: tracking.Tracker
    state: checkpoint.State

    def note_best(self, metrics: dict[str, float]) -> None:
        """Remembers whether this iteration is the best so far by train_evaluation.best_metric."""
        spec = self.config.train_evaluation
        value, best = metrics[spec.best_metric], self.state.best_value
        if math.isnan(value):
            return
        if best is None or (value > best if spec.higher_is_better else value < best):
            self.state = replace(self.state, best_iteration=self.state.iteration, best_value=value)

    def is_best(self) -> bool:
        """Whether the iteration just done is the best so far."""
        return self.state.best_iteration == self.state.iteration

    def save(self) -> None:
        """Writes a checkpoint of the current state."""
        with self.clock("checkpoint"):
            checkpoint.save(
                self.folder / "checkpoints",
                self.state,
                models=checkpointed(self),
                wrapped=(self.model, self.optimizer),
                sampler=self.sampler.envs.sampler,
                config=self.config.to_dict(),
                data=self.sampler.data,
                start=self.start,
                ranks=self.ranks,
                keep_last=self.config.train_evaluation.keep_last,
            )


@contextlib.contextmanager
def start(config: Config) -> Iterator[Run]:
    """A run, fresh or resumed; closes workers and trackers in any case. Raises ValueError for parts that do not fit."""
    reuse_freed_memory()
    disable_progress_bar()  # of transformers, which shows the loading of each small model
    folder = run_folder(config)
    ranks = Ranks(
        timeout_s=config.distributed.timeout_s,
        trackers=config.tracking.trackers,
        logging_dir=str(folder),
        gpus_per_process=config.distributed.gpus_per_process,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(ranks.finish)
        with claimed(folder, config, ranks, stack) as checkpoint_path:
            run = build(config, ranks, folder, stack)
            if checkpoint_path is not None:
                resume(run, checkpoint_path)
            run.tracker = tracking.Tracker(
                folder, ranks, n_iters=config.train_evaluation.n_iters, done=run.state.iteration
            )
            stack.callback(run.tracker.close)
        yield run


def build(config: Config, ranks: Ranks, folder: Path, stack: contextlib.ExitStack) -> Run:
    """All parts of a run as they are before its first iteration."""
    metrics = make_metrics(config)
    gpus = own_gpus(
        config.distributed.gpus_per_process,
        local_rank=ranks.accelerator.local_process_index,
        local_world_size=ranks.local_world_size,
    )
    placement.check(config, ranks.strategy.name, gpus)
    tokenizer = load_tokenizer(config)
    models = load_models(config, ranks)
    policy = models.actor_critic.policy
    check_generation_kwargs(config.train_evaluation.generation_kwargs or {}, vocab_size=policy.vocab_size)
    for notice in notices(config, policy) if ranks.is_main else ():
        print(f"note: {notice}", flush=True)
    sampler = make_sampler(config, ranks, folder, tokenizer, policy)
    stack.callback(sampler.envs.close)
    start = checkpoint.fingerprint(policy)
    if config.run.init_from is not None:
        start_from(models, Path(config.run.init_from))
    place_models(config, ranks, models, gpus, folder, stack)
    optimizer = make_optimizer(config, models.actor_critic)
    n_weights = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    # TRPO's policy has no optimizer.
    with without_gradient(policy) if isinstance(config.alg, TRPOAlg) else contextlib.nullcontext():
        model, optimizer = ranks.prepare(models.actor_critic, optimizer, config.alg.args.max_grad_norm)
    ranks.start_trackers(config.tracking.project_name, flatten(config.to_dict()))
    return Run(
        config=config,
        ranks=ranks,
        folder=folder,
        tokenizer=tokenizer,
        model=model,
        optimizer=optimizer,
        n_weights=n_weights,
        start=start,
        reference=models.frozen["reference"] if "reference" in models.frozen else adapters.reference_of(policy),
        mask_model=models.frozen.get("mask_model"),
        sampler=sampler,
        metrics=metrics,
        clock=tracking.Clock(ranks.device),
        resources=tracking.Resources(ranks.device),
        tracker=tracking.Tracker(folder, ranks, n_iters=0),
        state=checkpoint.State(kl_coef=config.alg.kl_div.coeff),
    )


def checkpointed(run: Run) -> dict[str, torch.nn.Module]:
    """The modules whose weights change, by the name of their file in a checkpoint."""
    modules: dict[str, torch.nn.Module] = {"model": run.ranks.unwrap(run.model)}
    return modules if run.mask_model is None else {**modules, "mask_model": run.mask_model}


def resume(run: Run, path: Path) -> None:
    """Puts the run where the checkpoint was, its files included."""
    run.state = checkpoint.load(
        path,
        models=checkpointed(run),
        wrapped=(run.model, run.optimizer),
        sampler=run.sampler.envs.sampler,
        config=run.config,
        data=run.sampler.data,
        start=run.start,
        ranks=run.ranks,
    )
    if run.ranks.is_main:
        tracking.forget_after(run.folder, run.state.iteration)
        done, n_iters = run.state.iteration, run.config.train_evaluation.n_iters
        rest = "" if done < n_iters else f": nothing is left to train up to n_iters {n_iters}, only the end is repeated"
        print(f"resumed from {path} after iteration {done}{rest}", flush=True)
    run.ranks.barrier()


def run_folder(config: Config) -> Path:
    """output_dir/project_name/experiment_name."""
    where = config.tracking
    return Path(where.output_dir) / where.project_name / where.experiment_name


def reuse_freed_memory() -> None:
    """Makes glibc keep freed blocks of any size.

    Training frees and takes the same large tensors all the time, and fresh pages cost more than the arithmetic on them:
    10-15 % of an iteration on CPU (GPT-2, 4 × 256). No effect on other systems.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for each large allocation
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: keep what is free at the top of the heap
