"""The shapes of a reward, and what is accepted from one."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import user_rewards
from text_world import SAMPLES

from envs.episode import Episode
from envs.rewards.contract import RewardError, call_batched, call_step, check_values, kind

EPISODES = [Episode(sample, sample.prompt, [4], True, False, text="a") for sample in SAMPLES]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (user_rewards.stepwise, "step"),
        (partial(user_rewards.scaled, scale=1.0), "step"),
        (user_rewards.Raises, "step"),
        (user_rewards.Raises("x"), "step"),
        (user_rewards.too_many, "batched"),
        (user_rewards.Batched, "batched"),
        (user_rewards.Batched(), "batched"),
        (lambda episodes, unused=1, *, also_unused=2: [], "batched"),
        (user_rewards.OnDevice, "device"),
    ],
)
def test_kind(reward: Any, expected: str) -> None:
    assert kind(reward) == expected


@pytest.mark.parametrize("reward", [user_rewards.no_reward, user_rewards.scaled, object, partial])
def test_no_kind(reward: Any) -> None:
    with pytest.raises(ValueError, match="a reward takes"):
        kind(reward)


@pytest.mark.parametrize("values", [[0, 1, True, 0.5, np.float32(0.1), np.int64(3), np.array([2.0])], np.arange(7)])
def test_numbers(values: Any) -> None:
    checked = check_values(values, EPISODES, user_rewards.Batched())
    assert checked == [float(value) for value in np.asarray([np.asarray(v).item() for v in values])]
    assert all(type(value) is float for value in checked)


@pytest.mark.parametrize("bad", [float("nan"), np.float32("inf"), "1.0", None, [1.0], np.ones(2), 1j, 10**400])
def test_not_a_number(bad: Any) -> None:
    with pytest.raises(RewardError, match="reward Batched on sample 's2': returned .* not a finite number") as error:
        check_values([0.0, 0.0, bad, *[0.0] * 4], EPISODES, user_rewards.Batched())
    assert error.value.episode is EPISODES[2]
    with pytest.raises(RewardError, match="reward <lambda> on sample 's0'"):
        call_step(lambda episode, t: bad, EPISODES[0], 0)


@pytest.mark.parametrize("bad", [1.0, None, "abcdefg", [0.0] * 6, []])
def test_not_one_number_each(bad: Any) -> None:
    with pytest.raises(RewardError, match="reward Batched on sample 's0': returned"):
        check_values(bad, EPISODES, user_rewards.Batched())


def test_the_episode_to_blame_is_found() -> None:
    with pytest.raises(RewardError, match="reward RaisesBatched on sample 's4': KeyError: 'no such key'") as error:
        call_batched(user_rewards.RaisesBatched("s4"), EPISODES)
    assert error.value.episode is EPISODES[4]
    with pytest.raises(RewardError, match="sample 's1': returned nan"):
        call_batched(user_rewards.Returns("nan"), EPISODES)
    with pytest.raises(RewardError, match="2 values for 1 episodes"):
        call_batched(user_rewards.too_many, EPISODES)
    assert call_batched(user_rewards.RaisesBatched("s4"), []) == []


def test_episode_decodes_only_when_asked() -> None:
    calls: list[list[int]] = []
    episode = Episode(SAMPLES[0], "a b", [4, 5], decode=lambda ids: (calls.append(list(ids)), "text")[1])
    assert episode == Episode(SAMPLES[0], "a b", [4, 5]) and not episode.is_last(1) and not calls
    assert episode.text_at(0) == "text" and calls == [[4]]
    assert [episode.response_text, episode.text_at(1), episode.response_text] == ["text"] * 3
    assert calls == [[4], [4, 5]]
    episode.truncated = True
    assert episode.is_last(1) and not episode.is_last(0)
    with pytest.raises(IndexError):
        episode.text_at(2)
    with pytest.raises(ValueError, match="no decode function"):
        _ = Episode(SAMPLES[0], "a b", [4]).response_text
    assert (episode.sample_id, episode.references, episode.meta) == ("s0", ["reference 0"], {"number": 0})
