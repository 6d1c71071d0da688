"""Checks that need two ranks, run by test_two_ranks.py through `accelerate launch`; arguments as of train/ppo.py.

At the end rank 1 is killed, while rank 0 waits for it.
"""

import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from helpers import Recording, changed, distance, flat, flat_gradient, make_rollout

from train.batches import Rollout
from train.collect import collect, gae_credit, reward
from train.config import load_config
from train.ppo import train, update
from train.setup import Run, resume, start
from train.stats import rollout_stats

COUNTS = [9, 3, 5, 7, 2, 8, 1]
SHARES = (range(5), range(5, 7))  # unequal: 26 and 9 tokens, 3 and 1 micro-batches of 2
BATCHWISE = {"alg__args__batch_size": 1000, "alg__args__n_epochs": 1, "alg__args__micro_batch_size": 2}


class Alone:
    """A world of one rank, in which nothing is exchanged."""

    rank, world_size, is_main, device = 0, 1, True, torch.device("cpu")
    strategy = SimpleNamespace(can_discard=True)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    min = max = sum

    def mean(self, sums: Any) -> dict[str, float]:
        return {name: float(total) / max(1.0, float(count)) for name, (total, count) in sums.items()}

    def unwrap(self, model: Any) -> Any:
        return model

    def accumulating(self, model: Any, last: bool) -> Any:
        return torch.enable_grad()

    def backward(self, model: Any, loss_sum: torch.Tensor, global_count: float, last: bool = True) -> None:
        (loss_sum / global_count).backward()


def union_and_share(run: Run) -> tuple[Rollout, Rollout]:
    """A rollout that the policy has moved away from, and this rank's part of it."""
    union = replace(make_rollout(COUNTS), action_mask=None)
    with torch.no_grad():
        now = run.ranks.unwrap(run.model)(
            union.prompt_ids, union.prompt_mask, union.response_ids, union.response_mask, temperature=1.0
        )
    union.old_logprobs = torch.where(union.response_mask, now.logprobs + 0.2 * union.old_logprobs, 0)
    return union, union.rows(torch.tensor(SHARES[run.ranks.rank]))


def check_reductions(run: Run) -> None:
    ranks = run.ranks
    assert ranks.world_size == 2 and ranks.is_main == (ranks.rank == 0)
    x = torch.tensor([1.0, 5.0]) if ranks.is_main else torch.tensor([4.0, 2.0])
    assert ranks.sum(x).tolist() == [5, 7] and ranks.max(x).tolist() == [4, 5] and ranks.min(x).tolist() == [1, 2]
    sums = {"b": (x[0], 1), "a": (x[1], 3 * ranks.rank), "none": (0.0, 0)}
    assert ranks.mean(sums) == {"a": 7 / 3, "b": 2.5, "none": 0.0}
    assert ranks.gather(["a", "b", "c"] if ranks.is_main else []) == ["a", "b", "c"]
    assert ranks.gather([f"rank {ranks.rank}"]) == ["rank 0", "rank 1"]
    assert ranks.broadcast({"from": ranks.rank}) == {"from": 0}


def check_gradients(run: Run) -> None:
    """Two ranks with unequal shares have the gradient and the statistics of one process with everything."""
    union, share = union_and_share(run)
    alone = SimpleNamespace(**vars(run))
    alone.model = run.ranks.unwrap(run.model)
    for scope in ("minibatch", "batch"):
        config = changed(run.config, **BATCHWISE, alg__args__advantage_scope=scope, alg__args__ent_coef=0.1)
        results = []
        for one, ranks, rollout in ((run, run.ranks, share), (alone, Alone(), union)):
            recording = Recording(ranks)
            parts = SimpleNamespace(**{**vars(one), "ranks": recording, "config": config})
            stats = update(parts, replace(rollout), 1)
            results.append((recording.gradients, stats))
        (ours, our_stats), (theirs, their_stats) = results
        assert len(ours) == len(theirs) == 1 and float(theirs[0].norm()) > 0.1
        assert distance(ours[0], theirs[0]) < 1e-5, distance(ours[0], theirs[0])
        assert our_stats.keys() == their_stats.keys()
        for name, value in their_stats.items():
            assert abs(our_stats[name] - value) <= 1e-5 * max(1, abs(value)), (name, our_stats[name], value)


def check_normalised_rewards(run: Run) -> None:
    union, share = union_and_share(run)
    config = changed(run.config, alg__kl_div__norm_reward=True, alg__args__gamma=0.9, alg__args__gae_lambda=0.8)
    for rollout, ranks in ((share, run.ranks), (union, Alone())):
        parts = SimpleNamespace(config=config, ranks=ranks, state=SimpleNamespace(kl_coef=0.3))
        counts = rollout.response_mask.sum(1)
        reward(parts, rollout, counts)
        credited = gae_credit(parts, rollout, counts)
        rollout.advantages, rollout.returns = credited.advantages, credited.returns
    for name in ("rewards", "advantages", "returns"):
        expected = getattr(union.rows(torch.tensor(SHARES[run.ranks.rank])), name)
        assert torch.allclose(getattr(share, name), expected, atol=1e-5), name


def same_everywhere(run: Run) -> torch.Tensor:
    """The parameters, which are the same on both ranks."""
    mine = flat(run.model)
    assert torch.equal(run.ranks.max(mine.clone()), mine) and torch.equal(run.ranks.min(mine.clone()), mine)
    return mine


def check_early_stop(run: Run) -> None:
    """The limit is on the mean over both ranks. Both stop together, before the step, without harm to what follows."""
    before = same_everywhere(run)
    share = replace(union_and_share(run)[1])
    share.old_logprobs = run_logprobs(run, share) - (1.0 if run.ranks.rank == 1 else 0.0)
    # (e - 1) - 1 at rank 1's 9 tokens, 0 at rank 0's 26: the mean over all is between the two.
    overall = (torch.e - 2) * 9 / 35
    for limit, n_steps in ((overall / 1.5 * 0.99, 0), (overall / 1.5 * 1.01, 1)):
        config = changed(run.config, **BATCHWISE, alg__args__target_kl=limit)
        stats = update(replace(run, config=config), share, 1)
        assert stats["policy/optimizer_steps"] == n_steps, (limit, stats)
        assert abs(stats["policy/approx_kl"] - overall) < 1e-4
        assert not flat_gradient(run.model).any()
        assert torch.equal(same_everywhere(run), before) == (n_steps == 0)


def run_logprobs(run: Run, part: Rollout) -> torch.Tensor:
    with torch.no_grad():
        model = run.ranks.unwrap(run.model)
        return model(part.prompt_ids, part.prompt_mask, part.response_ids, part.response_mask, temperature=1.0).logprobs


def check_gradient_that_is_not_finite(run: Run) -> None:
    before = same_everywhere(run)
    share = replace(union_and_share(run)[1])
    if run.ranks.rank == 1:
        share.returns = share.returns.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("nan")))
    try:
        update(replace(run, config=changed(run.config, **BATCHWISE)), share, 1)
    except FloatingPointError:
        run.optimizer.zero_grad()
    else:
        raise AssertionError("no FloatingPointError")
    assert torch.equal(same_everywhere(run), before)


def check_rollout(run: Run) -> None:
    """Ranks have their own samples; statistics and priorities are of all of them."""
    rollout = collect(run, 1)
    everyone = run.ranks.gather([tuple(row) for row in rollout.response_ids.tolist()])
    assert len(set(everyone)) == len(everyone)
    assert rollout_stats(run, rollout)["rollout/tokens"] == 2 * 48
    assert rollout_stats(run, rollout)["rollout/episodes"] == len(everyone)
    priorities = torch.from_numpy(run.sampler.envs.sampler.priorities.copy())
    assert torch.equal(run.ranks.max(priorities.clone()), run.ranks.min(priorities.clone()))
    drawn = set(run.ranks.gather(rollout.indices.tolist()))
    assert {i for i, priority in enumerate(priorities.tolist()) if priority != 1} == drawn


def check_training_and_resuming(run: Run) -> None:
    train(run)
    final = same_everywhere(run)
    resume(run, run.folder / "checkpoints" / "checkpoint_1")
    assert run.state.iteration == 1 and not torch.equal(same_everywhere(run), final)
    train(run)
    assert torch.equal(same_everywhere(run), final)


def main() -> None:
    with start(load_config(sys.argv[1:])) as run:
        check_reductions(run)
        check_gradients(run)
        check_normalised_rewards(run)
        check_early_stop(run)
        check_gradient_that_is_not_finite(run)
        check_rollout(run)
        check_training_and_resuming(run)
        pids = run.ranks.gather([os.getpid(), *run.sampler.envs.worker_pids])
        run.ranks.barrier()
        if run.ranks.is_main:
            print("processes", *pids, "checks passed", flush=True)
        run.ranks.barrier()
        if run.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.ranks.barrier()


if __name__ == "__main__":
    main()
