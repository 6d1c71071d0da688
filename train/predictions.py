"""The rows of an evaluation, one per response: the metrics over all of them, and how they are written down."""

import math
from collections.abc import Sequence
from typing import Any

from envs.episode import Episode
from envs.samples import Sample

Row = dict[str, Any]
PERPLEXITY = "fluency_metrics/reference_perplexity"


def episode_fields(episode: Episode) -> Row:
    """What has to travel between ranks to build the episode again from the sample file."""
    names = ("prompt_text", "response_ids", "terminated", "truncated", "response_text")
    return {name: getattr(episode, name) for name in names}


def measure(rows: list[Row], samples: Sequence[Sample], metrics: list[tuple[str, Any]], split: str) -> dict[str, float]:
    """Corpus values of all metrics; each row gets its own values under the same names.

    rows: {index of the sample, episode: see `episode_fields`}, and where they are known reward and nll, the negative
    log-probability of the response under the reference. metrics: (name, metric) as users know them.
    """
    episodes = []
    for row in rows:
        fields = dict(row.pop("episode"))
        row["length"] = float(len(fields["response_ids"]))
        episodes.append(Episode(samples[row["index"]], text=fields.pop("response_text"), **fields))
        row["_episode"] = episodes[-1]
    n, n_tokens = len(rows), sum(row["length"] for row in rows)
    values = {"reward": sum(row["reward"] for row in rows) / n} if "reward" in rows[0] else {}
    values["length"] = n_tokens / n
    values["truncated"] = sum(episode.truncated for episode in episodes) / n
    if "nll" in rows[0]:
        values[PERPLEXITY] = _perplexity(sum(row["nll"] for row in rows), n_tokens)
        for row in rows:
            row[PERPLEXITY] = _perplexity(row.pop("nll"), row["length"])
    for metric_id, metric in metrics:
        try:
            for name, (each, corpus) in metric(episodes).items():
                values[name] = float(corpus)
                for row, value in zip(rows, ["n/a"] * n if each is None else each, strict=True):
                    row[name] = value
        except Exception as error:
            raise RuntimeError(f"metric {metric_id} on the {split} split: {type(error).__name__}: {error}") from error
    return values


def _perplexity(nll: float, n_tokens: float) -> float:
    return math.exp(min(nll / max(1.0, n_tokens), 700))


def prediction(row: Row, split: str) -> Row:
    """A row that `measure` has completed as RL4LMs writes it: texts, then the values of the metrics."""
    episode = row.pop("_episode")
    references = "".join(f"<START-{i}>{text}<END-{i}>" for i, text in enumerate(episode.references, 1))
    row.pop("index")
    return {
        "split_name": split,
        "sample_id": episode.sample_id,
        "prompt_text": episode.prompt_text,
        "generated_text": episode.response_text,
        "ref_text": references,
        **row,
    }
