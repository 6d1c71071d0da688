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
from algorithms.models import load_actor_critic, load_language_model, load_reference, parameter_groups
from algorithms.nlpo import copy_weights
from algorithms.policy import ActorCritic, LanguageModel
from envs import registry
from envs.streams import generator
from train import checkpoint, tracking
from train.claim import claimed
from train.config import A2CAlg, Config, GRPOAlg, TRPOAlg
from train.config_args import CriticArgs
from train.config_types import flatten
from train.distributed import Ranks
from train.environments import make_metrics, make_sampler
from train.generation import check_generation_kwargs
from train.loading import check_model_name, load_tokenizer
from train.notices import notices
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
                optimizer=self.optimizer,
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
    ranks = Ranks(timeout_s=config.distributed.timeout_s, trackers=config.tracking.trackers, logging_dir=str(folder))
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
    args, metrics = config.alg.policy.args, make_metrics(config)
    tokenizer = load_tokenizer(config)
    check_model_name(args.model_name, ("config.json", adapters.CONFIG_FILE))
    check_model_name(adapters.base_of(args.model_name))
    torch.manual_seed(int(generator(config.alg.args.seed, "model").integers(2**62)))
    options = model_options(config)
    actor_critic = load_actor_critic(
        args.model_name,
        value_model="none" if isinstance(config.alg, GRPOAlg) else args.value_model,
        gradient_checkpointing=args.gradient_checkpointing,
        **options,
    )
    check_generation_kwargs(config.train_evaluation.generation_kwargs or {}, vocab_size=actor_critic.policy.vocab_size)
    for notice in notices(config, actor_critic.policy) if ranks.is_main else ():
        print(f"note: {notice}", flush=True)
    sampler = make_sampler(config, ranks, folder, tokenizer, actor_critic.policy)
    stack.callback(sampler.envs.close)
    start, mask_model = checkpoint.fingerprint(actor_critic.policy), None
    if sampler.spec.mask is not None and sampler.spec.mask.mask_type != "topk":
        mask_model = load_language_model(args.model_name, **options).requires_grad_(False).to(ranks.device)
        copy_weights(actor_critic.policy, mask_model)
    reference = adapters.reference_of(actor_critic.policy) if args.lora else load_reference(args.model_name, **options)
    model, optimizer = ranks.prepare(actor_critic, make_optimizer(config, actor_critic))
    ranks.start_trackers(config.tracking.project_name, flatten(config.to_dict()))
    return Run(
        config=config,
        ranks=ranks,
        folder=folder,
        tokenizer=tokenizer,
        model=model,
        optimizer=optimizer,
        start=start,
        reference=reference if args.lora else reference.to(ranks.device),
        mask_model=mask_model,
        sampler=sampler,
        metrics=metrics,
        clock=tracking.Clock(ranks.device),
        resources=tracking.Resources(ranks.device),
        tracker=tracking.Tracker(folder, ranks, n_iters=0),
        state=checkpoint.State(kl_coef=config.alg.kl_div.coeff),
    )


def model_options(config: Config) -> dict[str, Any]:
    """Keyword arguments with which policy, critic, reference and mask policy are all loaded."""
    policy = config.alg.policy
    return {
        "seq2seq": policy.is_seq2seq,
        "decoder_start_token_id": config.env.args.context_start_token if policy.is_seq2seq else None,
        "dtype": getattr(torch, policy.args.dtype),
        "logits_chunk_mb": policy.args.logits_chunk_mb,
        "lora": policy.args.lora,
    }


def checkpointed(run: Run) -> dict[str, torch.nn.Module]:
    """The modules whose weights change, by the name of their file in a checkpoint."""
    modules: dict[str, torch.nn.Module] = {"model": run.ranks.unwrap(run.model)}
    return modules if run.mask_model is None else {**modules, "mask_model": run.mask_model}


def resume(run: Run, path: Path) -> None:
    """Puts the run where the checkpoint was, its files included."""
    run.state = checkpoint.load(
        path,
        models=checkpointed(run),
        optimizer=run.optimizer,
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


def make_optimizer(config: Config, model: ActorCritic) -> torch.optim.Optimizer:
    """The optimizer of policy and critic, with a learning rate for each; TRPO's is of the critic alone."""
    alg, policy = config.alg, config.alg.policy.args
    critic_rate = alg.args.critic_learning_rate if isinstance(alg.args, CriticArgs) else None
    groups = parameter_groups(
        model,
        learning_rate=alg.args.learning_rate,
        critic_learning_rate=alg.args.learning_rate if critic_rate is None else critic_rate,
        weight_decay=policy.weight_decay,
    )
    if isinstance(alg, TRPOAlg):
        groups = [group for group in groups if group["name"].startswith("critic")]
    name, kwargs = policy.optimizer_class or "AdamW", policy.optimizer_kwargs
    if policy.optimizer_class is None and isinstance(alg, A2CAlg) and alg.args.use_rms_prop:
        name, kwargs = "RMSprop", {"alpha": 0.99, "eps": alg.args.rms_prop_eps, **kwargs}
    optimizers = {name: f"torch.optim:{name}" for name in ("AdamW", "Adam", "RMSprop", "SGD", "Adagrad", "Adadelta")}
    for key, place in (("lr", "alg.args.learning_rate"), ("weight_decay", "alg.policy.args.weight_decay")):
        if key in kwargs:
            raise ValueError(f"alg.policy.args.optimizer_kwargs.{key}: the place for it is {place}")
    kind = registry.resolve(name, optimizers, "alg.policy.args.optimizer_class")
    try:
        optimizer: torch.optim.Optimizer = kind(groups, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"alg.policy.args.optimizer_kwargs {policy.optimizer_kwargs}: {error}") from error
    return optimizer


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
