"""Counter-based randomness: a random number is a pure function of (seed, purpose, counters).

Nothing has to be saved to resume a run, and who draws a number (which rank, which worker) does not change it.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A generator of its own for each (seed, purpose, counters).

    seed, counters: integers in [0, 2**64), such as an iteration and a global environment index. Raises ValueError.
    """
    # Two words per number, and how many counters: SeedSequence pads with zeros, so (1, 2) and (1, 2, 0) would meet.
    numbers = [seed, zlib.crc32(purpose.encode()), len(counters), *(int(counter) for counter in counters)]
    for number in numbers:
        if not 0 <= number < 2**64:
            raise ValueError(f"stream {purpose!r}: seed and counters must be in [0, 2**64), got {number}")
    words = [word for number in numbers for word in (number & 0xFFFFFFFF, number >> 32)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def uniforms(seed: int, purpose: str, *counters: int, size: int | tuple[int, ...]) -> NDArray[np.float64]:
    """Independent uniform numbers in [0, 1) of the given shape: the first of `generator(seed, purpose, *counters)`."""
    return generator(seed, purpose, *counters).random(size)
