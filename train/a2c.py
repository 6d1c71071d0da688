"""A2C on a language model: `accelerate launch train/a2c.py --config FILE` or `python -m train.a2c --config FILE`.

One optimizer step per iteration, over all n_steps · n_envs · world_size transitions, accumulated over micro-batches.
"""

from torch import Tensor

from algorithms.a2c import a2c_loss
from envs.streams import generator
from train.batches import Rollout, minibatches
from train.collect import collect
from train.epochs import critic_stats
from train.loop import begin, end_iteration, finish, run_algorithm
from train.script import run_script
from train.setup import Run
from train.stats import rollout_stats
from train.update import Sums, lr_factor, optimizer_step, set_learning_rates


def train(run: Run) -> None:
    """The whole run, from where its state is."""
    for iteration in begin(run):
        rollout = collect(run, iteration)
        stats = rollout_stats(run, rollout)
        stats |= update(run, rollout, iteration)
        end_iteration(run, iteration, stats)
    finish(run)


def update(run: Run, rollout: Rollout, iteration: int) -> dict[str, float]:
    """The iteration's one step; returns the statistics of all ranks."""
    args, ranks = run.config.alg.args, run.ranks
    factor = lr_factor(iteration, run.config.train_evaluation.n_iters, args.lr_schedule, args.warmup_iterations)
    set_learning_rates(run.optimizer, factor)
    (whole,) = minibatches(
        rollout,
        ranks,
        generator(args.seed, "minibatch", iteration),
        batch_size=args.n_steps * run.config.env.n_envs,
        micro_batch_size=args.micro_batch_size,
        whiten_each=args.normalize_advantage,
    )
    with run.clock("update"), ranks.unwrap(run.model).recomputing(run.config.alg.policy.args.gradient_checkpointing):
        step = optimizer_step(
            lambda part: loss(run, part), whole, run.model, run.optimizer, ranks, max_grad_norm=args.max_grad_norm
        )
    means = ranks.mean(step.stats)
    return {
        **means,
        "loss/entropy": -means["policy/entropy"],
        "policy/grad_norm": step.grad_norm or 0.0,
        "policy/optimizer_steps": float(step.grad_norm is not None),
        "policy/learning_rate": factor * args.learning_rate,
        **critic_stats(run, rollout),
    }


def loss(run: Run, part: Rollout) -> tuple[Tensor, Sums]:
    """A2C's loss, summed over the tokens of a micro-batch."""
    args = run.config.alg.args
    now = run.model(
        part.prompt_ids,
        part.prompt_mask,
        part.response_ids,
        part.response_mask,
        temperature=run.sampler.spec.temperature,
        action_mask=part.action_mask,
    )
    return a2c_loss(
        logprobs=now.logprobs,
        entropy=now.entropy,
        values=now.values[:, :-1],
        advantages=part.advantages,
        returns=part.returns,
        response_mask=part.loss_mask,
        vf_coef=args.vf_coef,
        ent_coef=args.ent_coef,
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point: loads the configuration, sets the run up, trains."""
    run_algorithm("a2c", train, argv)


if __name__ == "__main__":
    run_script(main)
