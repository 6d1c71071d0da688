"""The updates that PPO, NLPO and GRPO share: several passes of clipped optimizer steps over a rollout."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from algorithms.advantages import kl_estimate, kl_penalty
from algorithms.masked import moments, whiten
from algorithms.policy import Scores
from algorithms.ppo import max_ratio
from envs.streams import generator
from train.batches import Rollout, minibatches
from train.setup import Run
from train.update import Sums, add_sums, explained_variance, lr_factor, optimizer_step, set_learning_rates

Loss = Callable[[Rollout, list[Tensor]], tuple[Tensor, Sums]]


def update_epochs(
    run: Run,
    rollout: Rollout,
    iteration: int,
    loss: Loss,
    *,
    advantage_scope: str | None,
    critic_only: bool = False,
    count: Callable[[Rollout], Tensor] = lambda part: part.loss_mask.sum(),
) -> dict[str, float]:
    """n_epochs passes of optimizer steps on `loss` over the rollout; returns the statistics of all ranks.

    loss(micro_batch, ratios) gives (loss_sum, stats) and adds its largest probability ratio to `ratios`.
    advantage_scope: what advantages are normalised over, "minibatch", "batch" or None. critic_only: the policy keeps
    its weights. count: see `optimizer_step`.
    """
    args, ranks = run.config.alg.args, run.ranks
    factor = lr_factor(iteration, run.config.train_evaluation.n_iters, args.lr_schedule, args.warmup_iterations)
    set_learning_rates(run.optimizer, factor)
    if advantage_scope == "batch":
        total = ranks.sum(moments(rollout.advantages, rollout.loss_mask))
        rollout.advantages = whiten(rollout.advantages, rollout.loss_mask, total)
    sums: Sums = {}
    norms: list[float] = []
    ratios: list[Tensor] = []
    with run.clock("update"), ranks.unwrap(run.model).recomputing(run.config.alg.policy.args.gradient_checkpointing):
        for micro_batches in passes(run, rollout, iteration, advantage_scope == "minibatch"):
            step = optimizer_step(
                lambda part: loss(part, ratios),
                micro_batches,
                run.model,
                run.optimizer,
                ranks,
                max_grad_norm=args.max_grad_norm,
                kl_limit=None if args.target_kl is None else 1.5 * args.target_kl,
                count=count,
                still="policy" if critic_only else None,
            )
            add_sums(sums, step.stats)
            if step.stopped:
                break
            norms += [] if step.grad_norm is None else [step.grad_norm]
    means = ranks.mean(sums)
    return {
        **means,
        "loss/entropy": -means["policy/entropy"],
        "policy/ratio_max": float(ranks.max(torch.stack(ratios).max())),
        "policy/grad_norm": sum(norms) / max(1, len(norms)),
        "policy/optimizer_steps": float(len(norms)),
        "policy/learning_rate": 0.0 if critic_only else factor * args.learning_rate,
    }


def passes(run: Run, rollout: Rollout, iteration: int, whiten_each: bool) -> Iterator[list[Rollout]]:
    """The micro-batches of each optimizer step: n_epochs times all minibatches, shuffled anew each time."""
    args = run.config.alg.args
    for epoch in range(args.n_epochs):
        yield from minibatches(
            rollout,
            run.ranks,
            generator(args.seed, "minibatch", iteration, epoch),
            batch_size=args.batch_size,
            micro_batch_size=args.micro_batch_size,
            whiten_each=whiten_each,
        )


def replay(run: Run, part: Rollout, ratios: list[Tensor]) -> tuple[Scores, Tensor | None]:
    """(scores, KL to the reference) of a micro-batch under the current weights, restricted as it was sampled.

    The KL [B, T] is the estimate that kl_div adds to the loss, None if it is in the rewards. The largest probability
    ratio is added to `ratios`.
    """
    kl_div = run.config.alg.kl_div
    now: Scores = run.model(
        part.prompt_ids,
        part.prompt_mask,
        part.response_ids,
        part.response_mask,
        temperature=run.sampler.spec.temperature,
        action_mask=part.action_mask,
        unrestricted=kl_div.in_loss,
    )
    ratios.append(max_ratio(now.logprobs, part.old_logprobs, part.loss_mask))
    if not kl_div.in_loss:
        return now, None
    kl = kl_penalty(kl_estimate(now.raw_logprobs, part.ref_logprobs), kl_div.estimator)
    return now, torch.where(run.sampler.spec.free(kl.shape[1]).to(kl.device), kl, 0)


def critic_stats(run: Run, rollout: Rollout) -> dict[str, float]:
    """How well the critic foresaw the returns of the rollout."""
    values, returns, mask = rollout.old_values, rollout.returns, rollout.response_mask
    return {"value/explained_variance": explained_variance(values, returns, mask, run.ranks)}
