"""Short sentences of real film reviews, to be continued: the task of the quick start.

The prompt is the first 3 to 5 words of a sentence, the reference the rest of it: what the model should generate after
the prompt, without the prompt. meta holds `label`, the sentiment of the whole review (1 positive, 0 negative).
"""

from __future__ import annotations

import os
from pathlib import Path

from envs.samples import Sample
from envs.tasks.jsonl import jsonl


def movie_reviews(split: str, *, path: str | os.PathLike[str] = "runs/quickstart/assets") -> list[Sample]:
    """The sentences that `python -m tools.quickstart prepare` wrote to `path`. Raises ValueError if there are none."""
    if not (Path(path) / f"{split}.jsonl").is_file():
        raise ValueError(
            f"datapool movie_reviews: there is no {split}.jsonl in {path}; "
            f"make it with `python -m tools.quickstart prepare --out {path}` (or `make quickstart`)"
        )
    return jsonl(split, path=path)
