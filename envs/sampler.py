"""Which sample an episode starts from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class PrioritySampler:
    """Draws index i with probability p_i proportional to priority_i ** priority_scale, with replacement.

    All priorities start at 1; priority_scale 0 is uniform. A sample whose priority is 0 is not drawn any more, unless
    all are 0. Meant for Prioritized Level Replay (Jiang et al. 2021), where a sample's priority is the mean |advantage|
    of its last episode.
    """

    def __init__(self, n: int, priority_scale: float = 0.0) -> None:
        if n < 1 or not 0 <= priority_scale < np.inf:
            raise ValueError(f"a sampler needs n >= 1 and a finite priority_scale >= 0, got {n} and {priority_scale}")
        self.n = n
        self.priority_scale = priority_scale
        self.priorities = np.ones(n)
        self._cdf: NDArray[np.float64] | None = None

    def draw(self, u: ArrayLike) -> NDArray[np.int64]:
        """One index for each uniform number in [0, 1): the inverse of the cumulative distribution."""
        u = np.asarray(u, dtype=np.float64)
        if self.priority_scale == 0:
            return np.minimum((u * self.n).astype(np.int64), self.n - 1)
        if self._cdf is None:
            largest = self.priorities.max()  # divided by, so that no power overflows
            weights = (self.priorities / largest) ** self.priority_scale if largest > 0 else np.ones(self.n)
            self._cdf = np.cumsum(weights)
            self._cdf /= self._cdf[-1]
        return np.searchsorted(self._cdf, u, side="right").astype(np.int64)

    def update(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Sets priorities (finite, >= 0; otherwise ValueError); of several for one index, the last counts."""
        values = np.asarray(priorities, dtype=np.float64)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"priorities must be finite and >= 0, got {values}")
        self.priorities[np.asarray(indices, dtype=np.int64)] = values
        self._cdf = None

    def state_dict(self) -> dict[str, Any]:
        return {"priorities": self.priorities.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is of another number of samples."""
        priorities = np.asarray(state["priorities"], dtype=np.float64)
        if priorities.shape != (self.n,):
            raise ValueError(f"the saved priorities are of {len(priorities)} samples, this task has {self.n}")
        self.update(np.arange(self.n), priorities)
