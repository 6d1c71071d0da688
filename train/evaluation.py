"""Evaluation: responses to a split, sharded over ranks, scored, measured, written down. The same for every script."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from algorithms.padding import to_right
from algorithms.policy import LanguageModel
from algorithms.sampling import SamplingSpec, sample_responses
from envs.rewards.contract import call_batched
from envs.streams import generator, uniforms
from train.config_loader import unknown
from train.config_sections import TrainEvaluation
from train.distributed import Ranks
from train.gathering import generating
from train.generation import OWN_KEYS
from train.predictions import Row, episode_fields, measure, prediction
from train.rollout import Sampler
from train.setup import Run
from train.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation works with.

    spec: the section train_evaluation, with the generation_kwargs in force (None: as `sampler` says)
    model: answers the prompts; in eval mode
    gather: see `train.gathering.generating`
    reference: scores the fluency of the answers (called as a LanguageModel is); None leaves that metric out
    mask_model: NLPO's mask policy, for answers sampled as in rollouts
    metrics: the metrics of spec.metrics, built
    precision: context in which the model runs
    """

    spec: TrainEvaluation
    ranks: Ranks
    model: LanguageModel
    sampler: Sampler
    metrics: list[Any]
    tracker: Tracker
    precision: Callable[[], contextlib.AbstractContextManager[Any]]
    gather: str = "auto"
    reference: Any = None
    mask_model: LanguageModel | None = None

    @property
    def has_reward(self) -> bool:
        """Whether answers are rewarded: supervised training needs no reward."""
        return self.sampler.device_reward is not None or self.sampler.envs.reward_kind is not None


def evaluate(run: Run, split: str, iteration: int) -> dict[str, float]:
    """`evaluate_split` of the current policy of a reinforcement learning run."""
    evaluation = Evaluation(
        spec=run.config.train_evaluation,
        ranks=run.ranks,
        model=run.ranks.unwrap(run.model).policy,
        sampler=run.sampler,
        metrics=run.metrics,
        tracker=run.tracker,
        precision=run.ranks.precision,
        gather=run.config.generation.gather,
        reference=run.reference,
        mask_model=run.mask_model,
    )
    with run.clock("eval"):
        metrics = evaluate_split(evaluation, split, iteration)
    name = run.config.train_evaluation.best_metric
    if split == "val" and name in metrics:
        run.tracker.say(f"val at {iteration}: {name} {metrics[name]:.3f}")
    return metrics


def evaluate_split(
    it: Evaluation, split: str, iteration: int, *, epoch: float | None = None, known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Metrics of `split`, on every rank; rank 0 writes them and the predictions. `known`: metrics measured before.

    Sample i goes to rank i mod world_size and draws from a stream of its own number: the result does not depend on the
    number of ranks, and two evaluations differ by the model alone.
    """
    n_samples = min(len(it.sampler.envs.samples[split]), it.spec.max_eval_samples or 2**62)
    mine = range(it.ranks.rank, n_samples, it.ranks.world_size)
    size = it.spec.eval_batch_size
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    n_own = len(batches)
    batches += [range(1)] * (it.ranks.agree_max(n_own) - n_own)  # for the other ranks' sake
    models = [model for model in (it.model, it.mask_model) if model is not None]
    with generating(it.ranks, models, it.gather, it.tracker.say) as going_on:
        parts = [_evaluate_batch(it, split, batch, going_on) for batch in batches]
    rows = it.ranks.gather([row for part in parts[:n_own] for row in part])
    rows.sort(key=lambda row: row["index"])
    metrics, problem = {}, None
    if it.ranks.is_main:
        try:
            named = [(spec.id, metric) for spec, metric in zip(it.spec.metrics, it.metrics, strict=True)]
            metrics = {**(known or {}), **measure(rows, it.sampler.envs.samples[split], named, split)}
            predictions = [prediction(row, split) for row in rows]
            it.tracker.log_evaluation(split, metrics, predictions, iteration, it.spec.n_logged_samples, epoch)
        except Exception as error:  # the other ranks wait for the metrics: they have to stop too
            problem = error
    metrics, failed = it.ranks.broadcast((metrics, problem is not None))
    if failed:
        raise problem or RuntimeError("rank 0 failed in the evaluation; its message says why")
    return metrics


def check_best_metric(run: Run, metrics: dict[str, float]) -> None:
    """Raises ValueError if train_evaluation.best_metric is none of the `metrics` of an evaluation."""
    name = run.config.train_evaluation.best_metric
    if name not in metrics:
        raise ValueError(f"train_evaluation.best_metric: {unknown('metric', name, metrics)}")


def _evaluate_batch(it: Evaluation, split: str, indices: Iterable[int], going_on: Callable[[bool], bool]) -> list[Row]:
    indices = list(indices)
    envs, device = it.sampler.envs, it.ranks.device
    encoded, _ = envs.prompts(split, indices)
    prompt_ids, prompt_mask = (torch.as_tensor(encoded[name], device=device) for name in ("prompt_ids", "prompt_mask"))
    width = int(prompt_mask.sum(1).max())
    prompt_ids, prompt_mask = prompt_ids[:, -width:], prompt_mask[:, -width:]
    ids, lengths = generate(it, split, indices, prompt_ids, prompt_mask, going_on)
    responses = [row[:n].tolist() for row, n in zip(ids.cpu(), lengths.cpu(), strict=True)]
    scored = envs.score(split, indices, responses)
    rows: list[Row] = [
        {"index": index, "episode": episode_fields(episode)}
        for index, episode in zip(indices, scored.episodes, strict=True)
    ]
    columns: dict[str, Iterable[Any]] = {}
    if it.has_reward:
        device_reward = it.sampler.device_reward
        columns["reward"] = scored.scores if device_reward is None else call_batched(device_reward, scored.episodes)
    if it.reference is not None:
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        with torch.no_grad(), it.precision():
            logprobs = it.reference(prompt_ids, prompt_mask, ids, mask).logprobs
        columns["nll"] = (-logprobs.double().sum(1)).tolist()
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def generate(
    it: Evaluation,
    split: str,
    indices: list[int],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    going_on: Callable[[bool], bool] = bool,
) -> tuple[Tensor, Tensor]:
    """(ids [B, T], lengths [B]) with train_evaluation.generation_kwargs, or as in rollouts if there are none.

    Plain sampling and greedy decoding go through our sampler; anything else (beams, penalties) through transformers'
    `generate`, whose random numbers are seeded from the same streams.
    """
    kwargs, spec, mask_model = it.spec.generation_kwargs, it.sampler.spec, it.mask_model
    if kwargs is not None:
        if not kwargs.keys() <= OWN_KEYS:
            in_step = going_on is not bool
            return _generate_with_transformers(it, kwargs, split, indices, prompt_ids, prompt_mask, in_step)
        given = {name: value for name, value in kwargs.items() if value is not None}
        spec = SamplingSpec(**{"max_new_tokens": spec.max_new_tokens, "do_sample": False, **given})
        mask_model = None
    draws = [uniforms(it.sampler.seed, f"eval {split}", index, size=spec.max_new_tokens) for index in indices]
    with it.precision():
        responses = sample_responses(
            it.model,
            prompt_ids,
            prompt_mask,
            torch.tensor(np.array(draws), dtype=torch.float32, device=prompt_ids.device),
            spec,
            eos_token_ids=it.sampler.eos_token_ids,
            stop_on_eos=it.sampler.stop_on_eos,
            pad_token_id=it.sampler.pad_token_id,
            mask_model=mask_model,
            going_on=going_on,
        )
    return responses.ids, responses.lengths


def _generate_with_transformers(
    it: Evaluation, kwargs: Row, split: str, indices: list[int], prompt_ids: Tensor, prompt_mask: Tensor, in_step: bool
) -> tuple[Tensor, Tensor]:
    lm, eos = it.model.lm, it.sampler.eos_token_ids if it.sampler.stop_on_eos else None
    given = {"max_new_tokens": it.sampler.spec.max_new_tokens, "eos_token_id": eos, **kwargs}
    before = prompt_ids.shape[1]
    if it.model.start_token_id is not None:
        prompt_ids, prompt_mask = to_right(prompt_ids, prompt_mask)
        given["decoder_start_token_id"], before = it.model.start_token_id, 1
    config = GenerationConfig(**given, pad_token_id=it.sampler.pad_token_id)
    defaults, lm.generation_config = lm.generation_config, GenerationConfig()  # a checkpoint's own defaults never apply
    try:
        with torch.random.fork_rng(), torch.no_grad(), it.precision():
            torch.manual_seed(int(generator(it.sampler.seed, f"eval {split}", indices[0]).integers(2**62)))
            sequences = lm.generate(
                prompt_ids, attention_mask=prompt_mask, generation_config=config, synced_gpus=in_step
            )
    finally:
        lm.generation_config = defaults
    ids = sequences[:, before:]
    stop = torch.isin(ids, torch.tensor(eos or [], device=ids.device, dtype=ids.dtype))
    # Up to and including the first EOS: by position, since the padding may be the same token.
    lengths = torch.where(stop.any(1), stop.int().argmax(1) + 1, ids.shape[1])
    return ids, lengths
