"""One prompt, many times: for tasks that need a reward but no data."""

from __future__ import annotations

from envs.samples import Sample


def dummy_pool(split: str, *, prompt: str, n_samples: int = 100) -> list[Sample]:
    """`n_samples` times the same prompt, without references; every split is the same. Raises ValueError below 1."""
    if n_samples < 1:
        raise ValueError(f"datapool dummy_pool: n_samples is {n_samples}; it must be at least 1")
    return [Sample(sample_id=f"{split}_{i}", prompt=prompt) for i in range(n_samples)]
