"""TRPO on a language model: `accelerate launch train/trpo.py --config FILE` or `python -m train.trpo --config FILE`.

One step of the policy per iteration: along the natural gradient, as far as the mean KL to the policy that sampled stays
below target_kl and the surrogate improves; else the policy stays as it was. Then n_critic_updates passes of the critic.
The step works on whole weights, gathered if need be, and holds six vectors of their size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algorithms.ppo import value_loss
from algorithms.trpo import restricted_logits, sub_sample, surrogate, trust_region_step
from algorithms.trust_region import trainable
from envs.streams import generator
from train.batches import Rollout, minibatches
from train.collect import collect
from train.epochs import critic_stats
from train.loop import begin, end_iteration, finish, run_algorithm
from train.script import run_script
from train.setup import Run
from train.stats import rollout_stats
from train.update import Sums, add_sums, lr_factor, optimizer_step, set_learning_rates


def train(run: Run) -> None:
    """The whole run, from where its state is."""
    for iteration in begin(run):
        rollout = collect(run, iteration)
        stats = rollout_stats(run, rollout)
        stats |= update(run, rollout, iteration)
        end_iteration(run, iteration, stats)
    finish(run)


def update(run: Run, rollout: Rollout, iteration: int) -> dict[str, float]:
    """The policy's step, then the critic's; returns the statistics of all ranks."""
    args = run.config.alg.args
    thinned = replace(rollout, loss_mask=sub_sample(rollout.loss_mask, args.sub_sampling_factor))
    (whole,), (few,) = (
        minibatches(
            transitions,
            run.ranks,
            generator(args.seed, "minibatch", iteration),
            batch_size=args.n_steps * run.config.env.n_envs,
            micro_batch_size=args.micro_batch_size,
            whiten_each=args.normalize_advantage,
        )
        for transitions in (rollout, thinned)
    )
    with run.clock("update"):
        stats = step_policy(run, whole, few)
        stats |= fit_critic(run, rollout, iteration)
    return stats | critic_stats(run, rollout)


def step_policy(run: Run, micro_batches: Sequence[Rollout], few: Sequence[Rollout]) -> dict[str, float]:
    """Moves the policy inside its trust region, or leaves every bit of it as it was. few: for the Fisher matrix."""
    args, ranks, policy = run.config.alg.args, run.ranks, run.ranks.unwrap(run.model).policy
    sums: Sums = {}

    def inputs(part: Rollout) -> dict[str, Any]:
        names = ("prompt_ids", "prompt_mask", "response_ids", "action_mask")
        given = {name: getattr(part, name) for name in names}
        return {**given, "response_mask": part.loss_mask, "temperature": run.sampler.spec.temperature}

    def objective(part: Rollout) -> Tensor:
        with ranks.precision():
            now = policy(**inputs(part))
        if torch.is_grad_enabled():  # once, before the step
            add_sums(sums, {"policy/entropy": (now.entropy.detach().sum(), part.loss_mask.sum())})
        return surrogate(now.logprobs, part.old_logprobs, part.advantages, part.loss_mask)[0]

    def logits(part: Rollout) -> Tensor:
        with ranks.precision():
            return restricted_logits(policy, **inputs(part))

    n_tokens, n_few = (max(1.0, count_tokens(run, parts)) for parts in (micro_batches, few))
    with ranks.strategy.gathered(policy, write=True):
        found = trust_region_step(
            trainable(policy),
            micro_batches,
            objective=objective,
            logits=logits,
            n_tokens=n_tokens,
            reduce=ranks.sum,
            target_kl=args.target_kl,
            damping=args.cg_damping,
            cg_max_steps=args.cg_max_steps,
            shrink=args.line_search_shrinking_factor,
            max_tries=args.line_search_max_iter,
            fisher_batches=few,
            fisher_tokens=n_few,
        )
    entropy = ranks.mean(sums)["policy/entropy"]
    # The exact KL of the step stands where other algorithms have an estimate.
    return {**found, "policy/approx_kl": found["policy/kl"], "policy/entropy": entropy, "loss/entropy": -entropy}


def fit_critic(run: Run, rollout: Rollout, iteration: int) -> dict[str, float]:
    """n_critic_updates passes of the critic over the rollout; the policy, also where they share a trunk, stays."""
    args = run.config.alg.args
    factor = lr_factor(iteration, run.config.train_evaluation.n_iters, args.lr_schedule, args.warmup_iterations)
    set_learning_rates(run.optimizer, factor)
    sums: Sums = {}
    norms: list[float] = []

    def error(part: Rollout) -> tuple[Tensor, Sums]:
        inputs = (part.prompt_ids, part.prompt_mask, part.response_ids, part.response_mask)
        values = run.model(*inputs, critic_only=True).values[:, :-1]
        old, returns = part.old_values, part.returns
        return value_loss(values=values, old_values=old, returns=returns, response_mask=part.loss_mask)

    for epoch in range(args.n_critic_updates):
        rng = generator(args.seed, "critic", iteration, epoch)
        sizes = {"batch_size": args.batch_size, "micro_batch_size": args.micro_batch_size}
        for micro_batches in minibatches(rollout, run.ranks, rng, **sizes, whiten_each=False):
            limit = {"max_grad_norm": args.max_grad_norm}
            step = optimizer_step(error, micro_batches, run.model, run.optimizer, run.ranks, **limit)
            add_sums(sums, step.stats)
            norms += [] if step.grad_norm is None else [step.grad_norm]
    return {
        **run.ranks.mean(sums),
        "value/grad_norm": sum(norms) / max(1, len(norms)),
        "value/optimizer_steps": float(len(norms)),
        "value/learning_rate": factor * args.learning_rate,
    }


def count_tokens(run: Run, micro_batches: Sequence[Rollout]) -> float:
    """Tokens that count in the losses, of all ranks."""
    return float(run.ranks.sum(torch.stack([part.loss_mask.sum() for part in micro_batches]).sum()))


def main(argv: list[str] | None = None) -> None:
    """Entry point: loads the configuration, sets the run up, trains."""
    run_algorithm("trpo", train, argv)


if __name__ == "__main__":
    run_script(main)
