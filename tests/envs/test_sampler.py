"""Which samples are drawn."""

import numpy as np
import pytest

from envs.sampler import PrioritySampler
from envs.streams import uniforms


def test_exact_inverse_of_the_distribution() -> None:
    sampler = PrioritySampler(4, priority_scale=2.0)
    sampler.update([0, 1, 2, 3], [1, 0, 2, 1])  # weights 1, 0, 4, 1
    below = np.nextafter
    u = [0, below(1 / 6, 0), 1 / 6, 0.5, below(5 / 6, 0), 5 / 6, below(1, 0)]
    assert sampler.draw(u).tolist() == [0, 0, 2, 2, 2, 3, 3]


def test_uniform_without_scale() -> None:
    sampler = PrioritySampler(5)
    sampler.update([0], [100.0])
    assert sampler.draw([0, 0.19, 0.2, 0.6, np.nextafter(1, 0)]).tolist() == [0, 0, 1, 3, 4]


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_drawn_in_proportion(scale: float) -> None:
    n, priorities = 60_000, np.array([1.0, 2.0, 0.5, 4.0])
    sampler = PrioritySampler(4, scale)
    sampler.update(np.arange(4), priorities)
    counts = np.bincount(sampler.draw(uniforms(1, "test", size=n)), minlength=4)
    p = priorities**scale / (priorities**scale).sum()
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi_square < 16.3  # 99.9th percentile with 3 degrees of freedom


def test_update_changes_what_is_drawn() -> None:
    sampler = PrioritySampler(3, 1.0)
    u = uniforms(2, "test", size=3000)
    before = np.bincount(sampler.draw(u), minlength=3)
    sampler.update([2, 2], [50.0, 8.0])  # the last one counts
    after = np.bincount(sampler.draw(u), minlength=3)
    assert np.abs(before - 1000).max() < 130
    assert after == pytest.approx([300, 300, 2400], abs=110)


def test_extreme_priorities() -> None:
    sampler = PrioritySampler(2, 4.0)
    sampler.update([0, 1], [1e300, 1e300])
    assert sampler.draw([0.4, 0.6]).tolist() == [0, 1]
    sampler.update([0, 1], [0.0, 0.0])
    assert sampler.draw([0.4, 0.6]).tolist() == [0, 1]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_refuses_what_is_no_priority(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and >= 0"):
        PrioritySampler(2, 1.0).update([0], [bad])


def test_refuses_settings() -> None:
    for n, scale in [(0, 1.0), (1, -1.0), (1, float("nan"))]:
        with pytest.raises(ValueError, match="a sampler needs"):
            PrioritySampler(n, scale)


def test_state() -> None:
    sampler, other = PrioritySampler(3, 1.0), PrioritySampler(3, 1.0)
    sampler.update([1], [5.0])
    other.draw([0.5])
    other.load_state_dict(sampler.state_dict())
    u = uniforms(3, "test", size=100)
    assert other.draw(u).tolist() == sampler.draw(u).tolist()
    with pytest.raises(ValueError, match="3 samples, this task has 4"):
        PrioritySampler(4, 1.0).load_state_dict(sampler.state_dict())
