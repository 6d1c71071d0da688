"""Counter-based random numbers."""

import subprocess
import sys

import numpy as np
import pytest

from envs.streams import generator, uniforms


def test_pure_function_also_in_another_process() -> None:
    here = uniforms(3, "sampling", 5, 2, size=4).tolist()
    assert here == uniforms(3, "sampling", 5, 2, size=4).tolist()
    code = "from envs.streams import uniforms; print(uniforms(3, 'sampling', 5, 2, size=4).tolist())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == str(here)


def test_every_argument_counts() -> None:
    keys = [
        (s, p, *c) for s in (0, 1, 2**32, 2**63) for p in ("a", "b") for c in [(), (0,), (1,), (0, 0), (1, 0), (0, 1)]
    ]
    drawn = {tuple(uniforms(*key, size=2).tolist()) for key in keys}  # type: ignore[arg-type]
    assert len(drawn) == len(keys)


def test_shape_range_and_kind() -> None:
    u = uniforms(0, "x", 1, size=(3, 4))
    assert u.shape == (3, 4) and u.dtype == np.float64 and (u >= 0).all() and (u < 1).all()
    assert uniforms(0, "x", 1, size=12).tolist() == u.ravel().tolist()
    assert generator(0, "x", 1).random(12).tolist() == u.ravel().tolist()
    assert uniforms(0, "x", np.int64(1), size=2).tolist() == u.ravel()[:2].tolist()  # type: ignore[arg-type]


def test_neighbouring_streams_are_independent() -> None:
    u = np.stack([uniforms(0, "x", i, size=2000) for i in range(20)])
    correlation = np.corrcoef(u) - np.eye(20)
    assert np.abs(correlation).max() < 0.12  # 5 standard deviations of 1 / sqrt(2000)
    first = np.array([uniforms(0, "x", i, size=1)[0] for i in range(4000)])
    assert np.histogram(first, 10, (0, 1))[0] == pytest.approx(np.full(10, 400), abs=100)  # 5 standard deviations


@pytest.mark.parametrize("arguments", [(-1, "x"), (0, "x", -1), (2**64, "x")])
def test_out_of_range(arguments: tuple[int, str]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        uniforms(*arguments, size=1)
