"""NLPO on a language model: `accelerate launch train/nlpo.py --config FILE` or `python -m train.nlpo --config FILE`.

PPO whose policy samples inside a mask: at each step the likeliest tokens of a mask policy, which becomes a copy of the
policy every target_update_iterations iterations. The update is PPO's: it replays the masks that sampling stored.
"""

from algorithms.nlpo import STATISTICS, copy_weights
from train.batches import Rollout
from train.collect import collect
from train.loop import begin, end_iteration, finish, run_algorithm
from train.ppo import update
from train.script import run_script
from train.setup import Run
from train.stats import rollout_stats


def train(run: Run) -> None:
    """The whole run, from where its state is."""
    for iteration in begin(run):
        rollout = collect(run, iteration)
        stats = rollout_stats(run, rollout) | mask_stats(run, rollout)
        stats |= update(run, rollout, iteration)
        follow(run, iteration)
        end_iteration(run, iteration, stats)
    finish(run)


def follow(run: Run, iteration: int) -> None:
    """The mask policy becomes the policy, every target_update_iterations iterations."""
    if run.mask_model is not None and iteration % run.config.alg.policy.args.target_update_iterations == 0:
        policy, gathered = run.ranks.unwrap(run.model).policy, run.ranks.strategy.gathered
        with gathered(policy), gathered(run.mask_model, write=True):
            copy_weights(policy, run.mask_model)


def mask_stats(run: Run, rollout: Rollout) -> dict[str, float]:
    """Means over the response tokens of all ranks: tokens in the mask, the policy's probability inside it, and how
    often its likeliest token is inside."""
    inside = rollout.mask_statistics[rollout.response_mask].sum(0)
    count = rollout.response_mask.sum()
    return run.ranks.mean({name: (x, count) for name, x in zip(STATISTICS, inside, strict=True)})


def main(argv: list[str] | None = None) -> None:
    """Entry point: loads the configuration, sets the run up, trains."""
    run_algorithm("nlpo", train, argv)


if __name__ == "__main__":
    run_script(main)
