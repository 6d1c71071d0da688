"""From episodes to a batch with advantages: scored by the models, rewarded, credited, cut to the token budget."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from algorithms.advantages import gae, kl_estimate, kl_penalty, shape_rewards, token_rewards
from algorithms.masked import moments, whiten
from algorithms.sampling import SamplingSpec
from envs.sampler import PrioritySampler
from train.batches import Rollout, micro_batches
from train.distributed import Ranks
from train.gathering import generating
from train.rollout import collect_waves, merge
from train.setup import Run

Credit = Callable[[Run, Rollout, Tensor], Rollout]


def gae_credit(run: Run, rollout: Rollout, counts: Tensor) -> Rollout:
    """The rollout cut to the budget, with advantages and returns by generalised advantage estimation."""
    rollout = cut(rollout, counts)
    rollout.advantages, rollout.returns = gae(
        rollout.rewards,
        rollout.old_values,
        rollout.response_mask,
        rollout.bootstrap,
        gamma=run.config.alg.args.gamma,
        gae_lambda=run.config.alg.args.gae_lambda,
    )
    return rollout


def collect(run: Run, iteration: int, credit: Credit = gae_credit) -> Rollout:
    """n_steps · n_envs transitions of this rank, scored and with advantages.

    `credit(run, rollout, counts)` turns rewards into advantages: it sees whole responses, of which the first `counts`
    tokens are in the budget, and returns the rollout cut to them.
    """
    config, ranks, sampler = run.config, run.ranks, run.sampler
    n_tokens = config.alg.args.n_steps * config.env.n_envs
    actor_critic = ranks.unwrap(run.model)
    models = [model for model in (actor_critic.policy, run.mask_model) if model is not None]
    with generating(ranks, models, config.generation.gather, run.tracker.say) as going_on:
        waves = collect_waves(models, sampler, n_tokens, iteration, ranks, run.clock, going_on)
    rollout, counts = merge(
        waves, n_tokens, bootstrap_truncated=config.env.args.bootstrap_truncated, group_size=sampler.group_size
    )
    with run.clock("score"):
        score(
            rollout,
            counts,
            actor_critic,
            run.reference,
            ranks,
            spec=sampler.spec,
            micro_batch_size=config.alg.args.micro_batch_size,
        )
    with run.clock("wait"):
        ranks.barrier()
    reward(run, rollout, counts)
    if config.env.args.mask_truncated:
        rollout.loss_mask = rollout.response_mask & ~rollout.truncated[:, None]
    rollout = credit(run, rollout, counts)
    if config.env.args.mask_truncated and not ranks.sum(rollout.loss_mask.sum()):
        run.tracker.say(f"iteration {iteration}: all responses were truncated and are masked, so nothing is trained")
    update_priorities(rollout, sampler.envs.sampler, ranks)
    return rollout


@torch.no_grad()
def score(
    rollout: Rollout,
    counts: Tensor,
    model: Any,
    reference: Any,
    ranks: Ranks,
    *,
    spec: SamplingSpec,
    micro_batch_size: int,
) -> None:
    """Fill in old_logprobs, ref_logprobs, old_values, kl and bootstrap: one teacher-forced forward of each model.

    The KL at a forced token is 0: it was not sampled from the policy. Raises FloatingPointError naming the sample if a
    log-probability is not finite.
    """
    results: dict[str, list[Tensor]] = {name: [] for name in ("old_logprobs", "ref_logprobs", "old_values", "kl")}
    bootstrap = torch.zeros_like(rollout.bootstrap)
    order = micro_batches(rollout.response_mask.sum(1), micro_batch_size)
    n_together = ranks.agree_max(len(order))
    for rows in order + order[-1:] * (n_together - len(order)):
        part = rollout.rows(rows)
        inputs = (part.prompt_ids, part.prompt_mask, part.response_ids, part.response_mask)
        own = model(*inputs, temperature=spec.temperature, action_mask=part.action_mask, unrestricted=True)
        with ranks.precision():
            ref = reference(*inputs, temperature=spec.temperature)
        sampled = part.response_mask & spec.free(part.response_mask.shape[1]).to(part.response_mask.device)
        kl = torch.where(sampled, kl_estimate(own.raw_logprobs, ref.raw_logprobs), 0)
        values = torch.zeros_like(kl)
        if own.values is not None:
            values = own.values[:, :-1]
            bootstrap[rows] = own.values.gather(1, counts[rows, None]).squeeze(1)
        new = (own.logprobs, ref.logprobs, values, kl)
        for parts, x in zip(results.values(), new, strict=True):
            parts.append(torch.nn.functional.pad(x, (0, rollout.response_ids.shape[1] - x.shape[1])))
    rollout.bootstrap *= bootstrap
    back = torch.cat(order).argsort()
    for name, parts in results.items():
        setattr(rollout, name, torch.where(rollout.response_mask, torch.cat(parts[: len(order)])[back], 0))
    finite = (
        torch.isfinite(rollout.old_logprobs) & torch.isfinite(rollout.kl) & torch.isfinite(rollout.old_values)
    ).all(1)
    if not finite.all():
        bad = rollout.indices[~finite].tolist()
        raise FloatingPointError(f"a log-probability or value is not finite in the episodes of training samples {bad}")


def reward(run: Run, rollout: Rollout, counts: Tensor) -> None:
    """Fill in the rewards of whole responses: the task's as reward_fn shapes them, less the KL, normalised if asked."""
    spec, kl_div = run.config.reward_fn, run.config.alg.kl_div
    shaped = shape_rewards(
        rollout.task_rewards,
        rollout.response_mask,
        rollout.truncated,
        scale=spec.scale,
        clip=spec.clip,
        missing_eos_penalty=spec.missing_eos_penalty,
    )
    kl_coef = 0.0 if kl_div.in_loss else run.state.kl_coef
    penalty = kl_penalty(rollout.kl, kl_div.estimator)
    rollout.rewards = token_rewards(shaped, penalty, rollout.response_mask, kl_coef=kl_coef)
    if kl_div.norm_reward:
        total = run.ranks.sum(moments(rollout.rewards, _first(rollout, counts)))
        rollout.rewards = whiten(rollout.rewards, rollout.response_mask, total, unbiased=False)


def _first(rollout: Rollout, counts: Tensor) -> Tensor:
    """bool [B, T], True at the first `counts` tokens of each response."""
    return torch.arange(rollout.response_ids.shape[1], device=counts.device) < counts[:, None]


def cut(rollout: Rollout, counts: Tensor) -> Rollout:
    """The rollout without what is over the budget: only the first `counts` tokens of each response count."""
    mask = _first(rollout, counts)
    masked = {
        f.name: torch.where(mask, x, 0)
        for f in fields(rollout)
        if isinstance(x := getattr(rollout, f.name), Tensor) and x.shape == mask.shape and x.is_floating_point()
    }
    rollout = replace(rollout, **masked, response_mask=mask, loss_mask=mask & rollout.loss_mask)
    return rollout if counts.all() else rollout.rows(counts.nonzero().squeeze(1))


def update_priorities(rollout: Rollout, sampler: PrioritySampler, ranks: Ranks) -> None:
    """Prioritised level replay: a sample's priority becomes its mean |advantage|, the same on every rank.

    Of several episodes with it, the mean. At least a hundredth of the batch's average, so that a sample that taught
    nothing once is still drawn some day.
    """
    if sampler.priority_scale == 0:
        return
    mean = rollout.advantages.abs().sum(1) / rollout.response_mask.sum(1)
    found: dict[int, list[float]] = {}
    for index, priority in ranks.gather(list(zip(rollout.indices.tolist(), mean.tolist(), strict=True))):
        found.setdefault(index, []).append(priority)
    means = {index: sum(priorities) / len(priorities) for index, priorities in found.items()}
    floor = 0.01 * sum(means.values()) / len(means)
    sampler.update(list(means), [max(priority, floor) for priority in means.values()])
