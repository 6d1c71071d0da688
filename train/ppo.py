"""PPO on a language model: `accelerate launch train/ppo.py --config FILE` or `python -m train.ppo --config FILE`.

One iteration: the policy answers prompts until each rank has n_steps · n_envs response tokens; the environments reward
the answers; one forward of policy, critic and reference scores them; n_epochs passes of clipped updates follow.
"""

from torch import Tensor

from algorithms.ppo import ppo_loss
from train.batches import Rollout
from train.collect import collect
from train.epochs import critic_stats, replay, update_epochs
from train.loop import begin, end_iteration, finish, run_algorithm
from train.script import run_script
from train.setup import Run
from train.stats import rollout_stats
from train.update import Sums


def train(run: Run) -> None:
    """The whole run, from where its state is."""
    for iteration in begin(run):
        rollout = collect(run, iteration)
        stats = rollout_stats(run, rollout)
        stats |= update(run, rollout, iteration)
        end_iteration(run, iteration, stats)
    finish(run)


def update(run: Run, rollout: Rollout, iteration: int) -> dict[str, float]:
    """n_epochs passes of PPO updates over the rollout; returns the statistics of all ranks."""
    args = run.config.alg.args
    warming_up = iteration <= args.critic_warmup_iterations
    stats = update_epochs(
        run,
        rollout,
        iteration,
        lambda part, ratios: loss(run, part, ratios, policy_coef=0.0 if warming_up else 1.0),
        advantage_scope=args.advantage_scope if args.normalize_advantage else None,
        critic_only=warming_up,
    )
    return stats | critic_stats(run, rollout)


def loss(run: Run, part: Rollout, ratios: list[Tensor], *, policy_coef: float = 1.0) -> tuple[Tensor, Sums]:
    """PPO's loss, summed over the tokens of a micro-batch; its largest probability ratio is added to `ratios`."""
    args = run.config.alg.args
    now, kl = replay(run, part, ratios)
    return ppo_loss(
        logprobs=now.logprobs,
        old_logprobs=part.old_logprobs,
        entropy=now.entropy,
        values=now.values[:, :-1],
        old_values=part.old_values,
        advantages=part.advantages,
        returns=part.returns,
        response_mask=part.loss_mask,
        clip_range=args.clip_range,
        clip_range_high=args.clip_range_high,
        dual_clip=args.dual_clip,
        clip_range_vf=args.clip_range_vf,
        clip_vf_max=args.clip_vf_max,
        vf_coef=args.vf_coef,
        ent_coef=args.ent_coef,
        kl=kl,
        kl_coef=run.state.kl_coef,
        policy_coef=policy_coef,
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point: loads the configuration, sets the run up, trains."""
    run_algorithm("ppo", train, argv)


if __name__ == "__main__":
    run_script(main)
