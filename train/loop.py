"""What surrounds an iteration in every algorithm: evaluation, the KL controller, metrics, checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from algorithms.advantages import update_kl_coef
from train.config import load_config
from train.evaluation import check_best_metric, evaluate
from train.finish import algorithm_name, save_model
from train.script import expect_algorithm
from train.setup import Run, start
from train.stats import performance


def run_algorithm(name: str, train: Callable[[Run], None], argv: Sequence[str] | None = None) -> None:
    """A whole run of the script for the algorithm `name`, with the configuration that a command line asks for."""
    config = load_config(argv, name)
    expect_algorithm(config.alg.id, name)
    with start(config) as run:
        train(run)


def begin(run: Run) -> range:
    """Evaluates if nothing is trained yet; returns the iterations still to do."""
    run.tracker.say(describe(run))
    if run.state.iteration == 0:
        check_best_metric(run, evaluate(run, "val", 0))
        evaluate(run, "test", 0)
    run.clock.take(), run.resources.take(run.sampler.envs.worker_pids, 1.0)
    return range(run.state.iteration + 1, run.config.train_evaluation.n_iters + 1)


def describe(run: Run) -> str:
    """What is about to run, on a line."""
    sizes = " / ".join(f"{len(samples):,}" for samples in run.sampler.envs.samples.values())
    names = " / ".join(run.sampler.envs.samples)
    what = f"{algorithm_name(run.config)} ({run.ranks.strategy.name}): {run.n_weights:,} weights to train"
    return f"{what}, {sizes} samples ({names}), in {run.folder}"


def end_iteration(run: Run, iteration: int, stats: dict[str, float]) -> None:
    """Moves the run's state on, evaluates, logs and saves where it is time to. stats: of all ranks, by metric key."""
    spec = run.config.train_evaluation
    kl_coef = update_kl_coef(run.state.kl_coef, stats["kl/ref"], run.config.alg.kl_div.target_kl)
    run.state = replace(run.state, iteration=iteration, kl_coef=kl_coef)
    last = iteration == spec.n_iters
    if last or (spec.eval_every and iteration % spec.eval_every == 0):
        run.note_best(evaluate(run, "val", iteration))
    # Before the checkpoint: a run that is killed between the two does the iteration again, and its line as well.
    run.tracker.log_iteration({**stats, **performance(run)}, iteration)
    if last or (spec.save_every and iteration % spec.save_every == 0) or run.is_best():
        run.save()


def finish(run: Run) -> None:
    """Evaluates on the test split, saves the trained model, prints the results."""
    if run.state.iteration > 0:
        evaluate(run, "test", run.state.iteration)
    save_model(run)
