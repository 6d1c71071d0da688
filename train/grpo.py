"""GRPO, RLOO and REINFORCE++: `accelerate launch train/grpo.py --config FILE` or `python -m train.grpo --config FILE`.

Critic-free: each prompt is answered num_generations times, and a response's advantage is how much better it is than
those beside it (or, for REINFORCE++, than the batch). The updates are clipped as PPO's.
"""

import torch
from torch import Tensor

from algorithms.advantages import gae, group_advantages
from algorithms.grpo import grpo_loss, loss_count, token_weights
from algorithms.masked import moments, whiten
from train.batches import Rollout
from train.collect import collect, cut
from train.epochs import replay, update_epochs
from train.loop import begin, end_iteration, finish, run_algorithm
from train.script import run_script
from train.setup import Run
from train.stats import rollout_stats
from train.update import Sums


def train(run: Run) -> None:
    """The whole run, from where its state is."""
    for iteration in begin(run):
        rollout = collect(run, iteration, group_credit)
        stats = rollout_stats(run, rollout)
        stats |= update(run, rollout, iteration)
        end_iteration(run, iteration, stats)
    finish(run)


def group_credit(run: Run, rollout: Rollout, counts: Tensor) -> Rollout:
    """The rollout cut to the budget, with the advantages of whole responses on each of their tokens."""
    args, mask = run.config.alg.args, rollout.response_mask
    if args.advantage_estimator == "reinforce_plus_plus":
        nothing = torch.zeros_like(rollout.rewards)
        # Without values and with λ = 1, generalised advantage estimation is the discounted reward to go.
        rollout.advantages, _ = gae(rollout.rewards, nothing, mask, nothing[:, 0], gamma=args.gamma, gae_lambda=1.0)
        rollout = cut(rollout, counts)
        total = run.ranks.sum(moments(rollout.advantages, rollout.loss_mask))
        rollout.advantages = whiten(rollout.advantages, rollout.loss_mask, total)
        return rollout
    groups = rollout.rewards.sum(1).view(-1, args.num_generations)
    advantages = group_advantages(groups, estimator=args.advantage_estimator, scale=args.scale_rewards)
    rollout.advantages = torch.where(mask, advantages.view(-1, 1), 0)
    return cut(rollout, counts)


def update(run: Run, rollout: Rollout, iteration: int) -> dict[str, float]:
    """n_epochs passes of updates over the rollout; returns the statistics of all ranks."""
    args, longest = run.config.alg.args, run.config.env.args.max_episode_length
    return update_epochs(
        run,
        rollout,
        iteration,
        lambda part, ratios: loss(run, part, ratios),
        advantage_scope=None,
        count=lambda part: loss_count(part.loss_mask, part.lengths, args.loss_normalization, longest),
    )


def loss(run: Run, part: Rollout, ratios: list[Tensor]) -> tuple[Tensor, Sums]:
    """GRPO's loss, summed over the tokens of a micro-batch; its largest probability ratio is added to `ratios`."""
    args, longest = run.config.alg.args, run.config.env.args.max_episode_length
    now, kl = replay(run, part, ratios)
    return grpo_loss(
        logprobs=now.logprobs,
        old_logprobs=part.old_logprobs,
        entropy=now.entropy,
        advantages=part.advantages,
        weights=token_weights(part.loss_mask, part.lengths, args.loss_normalization),
        count=loss_count(part.loss_mask, part.lengths, args.loss_normalization, longest),
        response_mask=part.loss_mask,
        clip_range=args.clip_range,
        clip_range_high=args.clip_range_high,
        dual_clip=args.dual_clip,
        ent_coef=args.ent_coef,
        kl=kl,
        kl_coef=run.state.kl_coef,
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point: loads the configuration, sets the run up, trains."""
    run_algorithm("grpo", train, argv)


if __name__ == "__main__":
    run_script(main)
