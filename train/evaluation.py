"""Evaluation: responses to a split, sharded over ranks, scored, measured, written down."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from algorithms.sampling import SamplingSpec, sample_responses
from envs.episode import Episode
from envs.rewards.contract import call_batched
from envs.streams import generator, uniforms
from train.config_loader import unknown
from train.setup import Run

Row = dict[str, Any]
OWN_KEYS = {"do_sample", "top_k", "top_p", "temperature", "min_new_tokens", "max_new_tokens"}


def evaluate(run: Run, split: str, iteration: int) -> dict[str, float]:
    """Metrics of `split` under the current policy, on every rank; rank 0 writes them and the predictions.

    Sample i goes to rank i mod world_size and draws from a stream of its own number: the result does not depend on the
    number of ranks, and two evaluations differ by the policy alone.
    """
    n_samples = min(len(run.sampler.envs.samples[split]), run.config.train_evaluation.max_eval_samples or 2**62)
    mine = range(run.ranks.rank, n_samples, run.ranks.world_size)
    size = run.config.train_evaluation.eval_batch_size
    with run.clock("eval"):
        batches = [mine[start : start + size] for start in range(0, len(mine), size)]
        rows = run.ranks.gather([row for batch in batches for row in _evaluate_batch(run, split, batch)])
        rows.sort(key=lambda row: row["index"])
        metrics, problem = {}, None
        if run.ranks.is_main:
            try:
                metrics = measure(run, split, rows)
                predictions = [_prediction(row, split) for row in rows]
                n_shown = run.config.train_evaluation.n_logged_samples
                run.tracker.log_evaluation(split, metrics, predictions, iteration, n_shown)
            except Exception as error:  # the other ranks wait for the metrics: they have to stop too
                problem = error
        metrics, failed = run.ranks.broadcast((metrics, problem is not None))
        if failed:
            raise problem or RuntimeError("rank 0 failed in the evaluation; its message says why")
    return metrics


def check_best_metric(run: Run, metrics: dict[str, float]) -> None:
    """Raises ValueError if train_evaluation.best_metric is none of the `metrics` of an evaluation."""
    name = run.config.train_evaluation.best_metric
    if name not in metrics:
        raise ValueError(f"train_evaluation.best_metric: {unknown('metric', name, metrics)}")


def _evaluate_batch(run: Run, split: str, indices: Iterable[int]) -> list[Row]:
    indices = list(indices)
    envs, device = run.sampler.envs, run.ranks.device
    encoded, _ = envs.prompts(split, indices)
    prompt_ids, prompt_mask = (torch.as_tensor(encoded[name], device=device) for name in ("prompt_ids", "prompt_mask"))
    width = int(prompt_mask.sum(1).max())
    prompt_ids, prompt_mask = prompt_ids[:, -width:], prompt_mask[:, -width:]
    ids, lengths = generate(run, split, indices, prompt_ids, prompt_mask)
    responses = [row[:n].tolist() for row, n in zip(ids.cpu(), lengths.cpu(), strict=True)]
    scored = envs.score(split, indices, responses)
    scores = scored.scores
    if run.sampler.device_reward is not None:
        scores = call_batched(run.sampler.device_reward, scored.episodes)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    with torch.no_grad(), run.ranks.precision():
        logprobs = run.reference(prompt_ids, prompt_mask, ids, mask).logprobs
    return [
        {"index": index, "episode": episode_fields(episode), "reward": score, "nll": -float(total)}
        for index, episode, score, total in zip(indices, scored.episodes, scores, logprobs.double().sum(1), strict=True)
    ]


def episode_fields(episode: Episode) -> Row:
    """What has to travel between ranks to build the episode again from the sample file."""
    names = ("prompt_text", "response_ids", "terminated", "truncated", "response_text")
    return {name: getattr(episode, name) for name in names}


def measure(run: Run, split: str, rows: list[Row]) -> dict[str, float]:
    """Corpus values of all metrics; each row gets its own values under the same names."""
    samples = run.sampler.envs.samples[split]
    episodes = []
    for row in rows:
        fields = dict(row.pop("episode"))
        row["length"] = float(len(fields["response_ids"]))
        row["fluency_metrics/reference_perplexity"] = math.exp(min(row["nll"] / max(1.0, row["length"]), 700))
        episodes.append(Episode(samples[row["index"]], text=fields.pop("response_text"), **fields))
        row["_episode"] = episodes[-1]
    n = len(rows)
    tokens = sum(row["length"] for row in rows)
    metrics = {
        "reward": sum(row["reward"] for row in rows) / n,
        "length": tokens / n,
        "truncated": sum(episode.truncated for episode in episodes) / n,
        "fluency_metrics/reference_perplexity": math.exp(min(sum(row["nll"] for row in rows) / max(1.0, tokens), 700)),
    }
    for spec, metric in zip(run.config.train_evaluation.metrics, run.metrics, strict=True):
        try:
            for name, (values, corpus) in metric(episodes).items():
                metrics[name] = float(corpus)
                for row, value in zip(rows, ["n/a"] * n if values is None else values, strict=True):
                    row[name] = value
        except Exception as error:
            raise RuntimeError(f"metric {spec.id} on the {split} split: {type(error).__name__}: {error}") from error
    return metrics


def _prediction(row: Row, split: str) -> Row:
    episode = row.pop("_episode")
    references = "".join(f"<START-{i}>{text}<END-{i}>" for i, text in enumerate(episode.references, 1))
    row.pop("index"), row.pop("nll")
    return {
        "split_name": split,
        "sample_id": episode.sample_id,
        "prompt_text": episode.prompt_text,
        "generated_text": episode.response_text,
        "ref_text": references,
        **row,
    }


def generate(
    run: Run, split: str, indices: list[int], prompt_ids: Tensor, prompt_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """(ids [B, T], lengths [B]) with train_evaluation.generation_kwargs, or as in rollouts if there are none.

    Plain sampling and greedy decoding go through our sampler; anything else (beams, penalties) through transformers'
    `generate`, whose random numbers are seeded from the same streams.
    """
    kwargs = run.config.train_evaluation.generation_kwargs
    spec, lm = run.sampler.spec, run.ranks.unwrap(run.model).policy.lm
    if kwargs is not None:
        _check_generation_kwargs(kwargs)
    if kwargs is not None and not kwargs.keys() <= OWN_KEYS:
        return _generate_with_transformers(run, lm, kwargs, split, indices, prompt_ids, prompt_mask)
    if kwargs is not None:
        given = {name: value for name, value in kwargs.items() if value is not None}
        spec = SamplingSpec(**{"max_new_tokens": spec.max_new_tokens, "do_sample": False, **given})
    draws = [uniforms(run.sampler.seed, f"eval {split}", index, size=spec.max_new_tokens) for index in indices]
    with run.ranks.precision():
        responses = sample_responses(
            lm,
            prompt_ids,
            prompt_mask,
            torch.tensor(np.array(draws), dtype=torch.float32, device=prompt_ids.device),
            spec,
            eos_token_ids=run.sampler.eos_token_ids,
            stop_on_eos=run.sampler.stop_on_eos,
            pad_token_id=run.sampler.pad_token_id,
        )
    return responses.ids, responses.lengths


def _check_generation_kwargs(kwargs: Row) -> None:
    """Raises ValueError for what transformers would ignore without a word, or sample nonsense with."""
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name in kwargs:
        if name not in known:
            raise ValueError(f"train_evaluation.generation_kwargs: {unknown('keyword', name, known)}")
    if (temperature := kwargs.get("temperature")) is not None and temperature <= 0:
        raise ValueError(
            f"train_evaluation.generation_kwargs.temperature is {temperature}: it must be above 0; "
            "do_sample: false takes the likeliest tokens"
        )


def _generate_with_transformers(
    run: Run, lm: Any, kwargs: Row, split: str, indices: list[int], prompt_ids: Tensor, prompt_mask: Tensor
) -> tuple[Tensor, Tensor]:
    eos = run.sampler.eos_token_ids if run.sampler.stop_on_eos else None
    config = GenerationConfig(
        **{"max_new_tokens": run.sampler.spec.max_new_tokens, "eos_token_id": eos, **kwargs},
        pad_token_id=run.sampler.pad_token_id,
    )
    defaults, lm.generation_config = lm.generation_config, GenerationConfig()  # a checkpoint's own defaults never apply
    try:
        with torch.random.fork_rng(), torch.no_grad(), run.ranks.precision():
            torch.manual_seed(int(generator(run.sampler.seed, f"eval {split}", indices[0]).integers(2**62)))
            sequences = lm.generate(prompt_ids, attention_mask=prompt_mask, generation_config=config)
    finally:
        lm.generation_config = defaults
    ids = sequences[:, prompt_ids.shape[1] :]
    stop = torch.isin(ids, torch.tensor(eos or [], device=ids.device, dtype=ids.dtype))
    # Up to and including the first EOS: by position, since the padding may be the same token.
    lengths = torch.where(stop.any(1), stop.int().argmax(1) + 1, ids.shape[1])
    return ids, lengths
