"""PPO on a language model: `accelerate launch train/ppo.py --config FILE` or `python -m train.ppo --config FILE`.

One iteration: the policy answers prompts until each rank has n_steps · n_envs response tokens; the environments reward
the answers; one forward of policy, critic and reference scores them; n_epochs passes of clipped updates follow.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from algorithms.advantages import update_kl_coef
from algorithms.masked import moments, whiten
from algorithms.ppo import max_ratio, ppo_loss
from envs.streams import generator
from train.batches import Rollout, minibatches
from train.config import load_config
from train.evaluation import check_best_metric, evaluate
from train.finish import finish
from train.rollout import assign_credit, collect_waves, merge, score, update_priorities
from train.script import expect_algorithm, run_script
from train.setup import Run, start
from train.stats import performance, rollout_stats
from train.update import Sums, add_sums, explained_variance, lr_factor, optimizer_step, set_learning_rates


def train(run: Run) -> None:
    """The whole run, from where its state is."""
    evaluation = run.config.train_evaluation
    if run.state.iteration == 0:
        check_best_metric(run, evaluate(run, "val", 0))
        evaluate(run, "test", 0)
    run.clock.take()
    for iteration in range(run.state.iteration + 1, evaluation.n_iters + 1):
        rollout = collect(run, iteration)
        stats = rollout_stats(rollout, run.ranks, run.state.kl_coef)
        stats |= update(run, rollout, iteration)
        kl_coef = update_kl_coef(run.state.kl_coef, stats["kl/ref"], run.config.alg.kl_div.target_kl)
        run.state = replace(run.state, iteration=iteration, kl_coef=kl_coef)
        last = iteration == evaluation.n_iters
        if last or (evaluation.eval_every and iteration % evaluation.eval_every == 0):
            run.note_best(evaluate(run, "val", iteration))
        # Before the checkpoint: a run that is killed between the two does the iteration again, and its line as well.
        run.tracker.log_iteration({**stats, **performance(run)}, iteration)
        if last or (evaluation.save_every and iteration % evaluation.save_every == 0) or run.is_best():
            run.save()
    if run.state.iteration > 0:
        evaluate(run, "test", run.state.iteration)
    finish(run)


def collect(run: Run, iteration: int) -> Rollout:
    """n_steps · n_envs transitions of this rank, scored and with advantages."""
    args, kl_div = run.config.alg.args, run.config.alg.kl_div
    n_tokens = args.n_steps * run.config.env.n_envs
    lm = run.ranks.unwrap(run.model).policy.lm
    waves = collect_waves(lm, run.sampler, n_tokens, iteration, run.ranks, run.clock)
    with run.clock("score"):
        rollout = merge(waves, n_tokens, run.config.env.args.bootstrap_truncated)
        score(
            rollout,
            run.ranks.unwrap(run.model),
            run.reference,
            run.ranks,
            temperature=run.sampler.spec.temperature,
            micro_batch_size=args.micro_batch_size,
        )
    with run.clock("wait"):
        run.ranks.barrier()
    assign_credit(
        rollout,
        run.ranks,
        kl_coef=run.state.kl_coef,
        norm_reward=kl_div.norm_reward,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
    )
    update_priorities(rollout, run.sampler.envs.sampler, run.ranks)
    return rollout


def update(run: Run, rollout: Rollout, iteration: int) -> dict[str, float]:
    """n_epochs passes of PPO updates over the rollout; returns the statistics of all ranks."""
    args, ranks = run.config.alg.args, run.ranks
    factor = lr_factor(iteration, run.config.train_evaluation.n_iters, args.lr_schedule, args.warmup_iterations)
    set_learning_rates(run.optimizer, factor)
    if args.normalize_advantage and args.advantage_scope == "batch":
        total = ranks.sum(moments(rollout.advantages, rollout.response_mask))
        rollout.advantages = whiten(rollout.advantages, rollout.response_mask, total)
    sums: Sums = {}
    norms: list[float] = []
    ratios: list[Tensor] = []
    with run.clock("update"), ranks.unwrap(run.model).recomputing(run.config.alg.policy.args.gradient_checkpointing):
        for micro_batches in passes(run, rollout, iteration):
            step = optimizer_step(
                lambda part: loss(run, part, ratios),
                micro_batches,
                run.model,
                run.optimizer,
                ranks,
                max_grad_norm=args.max_grad_norm,
                kl_limit=None if args.target_kl is None else 1.5 * args.target_kl,
            )
            add_sums(sums, step.stats)
            if step.grad_norm is None:
                break
            norms.append(step.grad_norm)
    values, returns, mask = rollout.old_values, rollout.returns, rollout.response_mask
    means = ranks.mean(sums)
    return {
        **means,
        "loss/entropy": -means["policy/entropy"],
        "policy/ratio_max": float(ranks.max(torch.stack(ratios).max())),
        "policy/grad_norm": sum(norms) / max(1, len(norms)),
        "policy/optimizer_steps": float(len(norms)),
        "policy/learning_rate": factor * args.learning_rate,
        "value/explained_variance": explained_variance(values, returns, mask, ranks),
    }


def passes(run: Run, rollout: Rollout, iteration: int) -> Iterator[list[Rollout]]:
    """The micro-batches of each optimizer step: n_epochs times all minibatches, shuffled anew each time."""
    args = run.config.alg.args
    for epoch in range(args.n_epochs):
        yield from minibatches(
            rollout,
            run.ranks,
            generator(args.seed, "minibatch", iteration, epoch),
            batch_size=args.batch_size,
            micro_batch_size=args.micro_batch_size,
            whiten_each=args.normalize_advantage and args.advantage_scope == "minibatch",
        )


def loss(run: Run, part: Rollout, ratios: list[Tensor]) -> tuple[Tensor, Sums]:
    """PPO's loss, summed over the tokens of a micro-batch; its largest probability ratio is added to `ratios`."""
    args = run.config.alg.args
    now = run.model(
        part.prompt_ids,
        part.prompt_mask,
        part.response_ids,
        part.response_mask,
        temperature=run.sampler.spec.temperature,
        action_mask=part.action_mask,
    )
    ratios.append(max_ratio(now.logprobs, part.old_logprobs, part.response_mask))
    return ppo_loss(
        logprobs=now.logprobs,
        old_logprobs=part.old_logprobs,
        entropy=now.entropy,
        values=now.values[:, :-1],
        old_values=part.old_values,
        advantages=part.advantages,
        returns=part.returns,
        response_mask=part.response_mask,
        clip_range=args.clip_range,
        clip_range_vf=args.clip_range_vf,
        vf_coef=args.vf_coef,
        ent_coef=args.ent_coef,
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point: loads the configuration, sets the run up, trains."""
    config = load_config(argv)
    expect_algorithm(config.alg.id, "ppo")
    with start(config) as run:
        train(run)


if __name__ == "__main__":
    run_script(main)
