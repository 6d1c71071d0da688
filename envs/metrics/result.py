"""What a metric returns."""

from __future__ import annotations

from collections.abc import Sequence

Result = dict[str, tuple[list[float] | None, float]]
"""{key: (one value per episode, or None if there is none; value of all episodes)}"""


def with_mean(key: str, values: Sequence[float]) -> Result:
    """Values of episodes and their mean; of no episodes, 0."""
    return {key: (list(values), sum(values) / len(values) if values else 0.0)}
