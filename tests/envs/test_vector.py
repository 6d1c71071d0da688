"""Vector environments that work: the same results as one TextEnv, whatever the number of workers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import user_rewards
from gymnasium.vector import AutoresetMode, VectorEnv
from text_world import ENV, EOS, PAD, SAMPLES, make_tokenizer

from envs.text_env import TextEnv
from envs.vector import TextVectorEnv

Make = Callable[..., TextVectorEnv]
A, B, C = 4, 5, 6
RESPONSES = [[A, B, EOS], [A] * 6, [B], [EOS], [C, A, A, EOS]]
INDICES = [0, 1, 2, 2, 4]
REWARDS = [("stepwise", user_rewards.stepwise), ("Batched", user_rewards.Batched()), (None, None)]


def test_it_is_a_gymnasium_vector_env(make_vector: Make) -> None:
    vector = make_vector(3, 2)
    assert isinstance(vector, VectorEnv) and vector.num_envs == 3
    assert vector.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    observation, infos = vector.reset()
    assert vector.observation_space.contains(observation)
    assert infos["_index"].all() and [f"s{i}" for i in infos["index"]] == infos["sample_id"].tolist()
    actions = vector.action_space.sample()
    observation, rewards, terminated, truncated, infos = vector.step(actions)
    assert vector.observation_space.contains(observation)
    assert [x.shape for x in (rewards, terminated, truncated)] == [(3,)] * 3
    assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)


@pytest.mark.parametrize(
    ("n_workers", "name", "reward"), [(n, *reward) for n in (1, 3) for reward in REWARDS] + [(7, *REWARDS[0])]
)
def test_play_equals_a_single_environment(make_vector: Make, n_workers: int, name: str, reward: Any) -> None:
    vector = make_vector(5, n_workers, name, first_env=10)
    vector.reset(options={"indices": INDICES})
    result = vector.play([np.array(ids) for ids in RESPONSES])
    assert result.rewards.shape == (5, 6) and result.lengths.tolist() == [3, 6, 1, 1, 4]
    for i, (index, ids) in enumerate(zip(INDICES, RESPONSES, strict=True)):
        env = TextEnv(make_tokenizer(), SAMPLES, reward, **ENV)
        env.reset(options={"index": index})
        rewards, terminated, truncated = env.play(ids)
        assert result.rewards[i].tolist() == [*rewards, *[0.0] * (6 - len(ids))]
        assert (result.terminated[i], result.truncated[i]) == (terminated, truncated)
        assert result.texts[i] == env.running().response_text
        assert result.episodes[i] == env.episode


@pytest.mark.parametrize(("name", "reward"), REWARDS)
def test_step_equals_play(make_vector: Make, name: str, reward: Any) -> None:
    played, stepped = make_vector(2, 2, name), make_vector(2, 1, name)
    responses = [[A, B, C, EOS], [B, B, A, A]]
    single = TextEnv(make_tokenizer(), SAMPLES, reward, **ENV)
    played.reset(options={"indices": [3, 5]})
    stepped.reset(options={"indices": [3, 5]})
    single.reset(options={"index": 3})
    result = played.play(responses)
    for t, actions in enumerate(zip(*responses, strict=True)):
        observation, rewards, terminated, truncated, infos = stepped.step(actions)
        expected = single.step(actions[0])
        assert rewards.tolist() == result.rewards[:, t].tolist()
        assert {key: array[0].tolist() for key, array in observation.items()} == {
            key: array.tolist() for key, array in expected[0].items()
        }
    assert terminated.tolist() == result.terminated.tolist() == [True, False]
    assert truncated.tolist() == result.truncated.tolist() == [False, False]
    assert infos["episode"][0] == result.episodes[0] == single.episode
    assert infos["_episode"].tolist() == [True, False]
    assert result.episodes[0].response_text == infos["episode"][0].response_text == "a b c"


def test_episodes_go_on_and_are_reset_one_by_one(make_vector: Make) -> None:
    vector = make_vector(3, 2, "Batched")
    vector.reset(options={"indices": [0, 1, 2]})
    vector.step([A, A, EOS])
    with pytest.raises(RuntimeError, match="environment 2 has ended"):
        vector.step([A, A, A])
    with pytest.raises(RuntimeError, match="environment 2 has ended"):
        vector.play([[A], [A], [A]])
    result = vector.play([[A, EOS], [A] * 5, []])
    assert result.rewards.tolist() == [[0, 2 / 3, 0, 0, 0], [0, 0, 0, 0, 3.0], [0] * 5]
    assert result.terminated.tolist() == [True, False, True] and result.truncated.tolist() == [False, True, False]
    observation, infos = vector.reset(options={"indices": [4, 4, 4], "reset_mask": [True, False, True]})
    assert infos["_index"].tolist() == [True, False, True] and infos["index"].tolist() == [4, 0, 4]
    assert observation["response_mask"].sum(1).tolist() == [0, 6, 0]
    assert observation["response_ids"][0].tolist() == [PAD] * 6
    assert observation["prompt_ids"][:, -1].tolist() == [B, C, B]
    assert vector.play([[EOS], [], [A]]).terminated.tolist() == [True, False, False]


def test_observations_are_copies(make_vector: Make) -> None:
    vector = make_vector(1, 1)
    first, _ = vector.reset()
    first["response_ids"][:] = 9
    second, *_ = vector.step([A])
    assert second["response_ids"].tolist() == [[A] + [PAD] * 5]


def test_the_samples_of_reset(make_vector: Make) -> None:
    def drawn(vector: TextVectorEnv, n: int = 6, **kwargs: Any) -> list[list[int]]:
        return [vector.reset(**(kwargs if i == 0 else {}))[1]["index"].tolist() for i in range(n)]

    four = make_vector(4, 2)
    all_four = drawn(four)
    halves = [drawn(make_vector(2, 1, first_env=first)) for first in (0, 2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == all_four
    assert drawn(four, seed=7) == all_four
    assert drawn(four, seed=8) != all_four
    assert len({tuple(indices) for indices in all_four}) == 6


def test_priorities(make_vector: Make) -> None:
    vector = make_vector(3, 1, env={"priority_scale": 1.0})
    vector.sampler.update(range(len(SAMPLES)), [0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    assert vector.reset()[1]["index"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("n_workers", [1, 3])
def test_score(make_vector: Make, n_workers: int) -> None:
    vector = make_vector(2, n_workers, "stepwise")
    vector.reset(options={"indices": [0, 1]})
    vector.step([A, A])
    responses = [[A] * (i % 9) + [EOS] * (i % 2) for i in range(40)]
    result = vector.score("val", range(40), responses)
    assert result.texts == [" ".join("a" * (i % 9)) for i in range(40)]
    assert result.prompt_texts == ["a b c"] * 40
    assert [e.sample_id for e in result.episodes] == [f"v{i}" for i in range(40)]
    assert [e.terminated for e in result.episodes] == [not e.truncated for e in result.episodes]
    assert [e.terminated for e in result.episodes] == [bool(i % 2) for i in range(40)]
    env = TextEnv(make_tokenizer(), [vector.sample("val", 3)], user_rewards.stepwise, **ENV)
    env.reset()
    assert result.scores[3] == sum(env.play(responses[3])[0].tolist())
    assert result.scores[0] == 0.0
    assert vector.play([[EOS], [EOS]]).episodes[0].response_ids == [A, EOS]  # not disturbed
    assert vector.score("val", [], []).scores == []
    with pytest.raises(ValueError, match=r"no split 'test', only \['train', 'val'\]"):
        vector.score("test", [0], [[A]])


def test_score_of_a_batched_reward(make_vector: Make) -> None:
    result = make_vector(1, 2, "Batched", {"scale": 0.1}).score("train", [1, 3, 1], [[A, A, EOS], [A], []])
    assert result.scores == [1.2, 3.1, 1.0]


def test_prompts_are_those_of_reset(make_vector: Make) -> None:
    vector = make_vector(7, 2)
    observation, _ = vector.reset(options={"indices": range(7)})
    prompts, texts = vector.prompts("train", range(7))
    for key, array in prompts.items():
        assert array.tolist() == observation[key].tolist()
    assert texts[:3] == ["a b", "c", "c d e f"]


def test_the_reward_of_the_device_is_not_built(make_vector: Make) -> None:
    vector = make_vector(1, 1, "OnDevice", {"device": "cuda:0"})
    assert vector.reward_kind == "device"
    vector.reset()
    result = vector.play([[A, EOS]])
    assert result.rewards.tolist() == [[0, 0]] and result.terminated.tolist() == [True]
    assert result.episodes[0].response_text == "a"


def test_long_messages(make_vector: Make) -> None:
    vector = make_vector(2, 1, "token_a", env={"max_episode_length": 300_000, "terminate_on_eos": False})
    vector.reset(options={"indices": [0, 1]})
    ids = np.random.default_rng(0).integers(4, 14, (2, 300_000))
    result = vector.play(list(ids))
    assert result.rewards.tolist() == np.where(ids == A, 0.1, 0.0).tolist()
    assert result.truncated.all()


def test_rewards_come_back_exactly(make_vector: Make) -> None:
    vector = make_vector(1, 1, "stepwise")
    vector.reset(options={"indices": [2]})
    env = TextEnv(make_tokenizer(), SAMPLES, user_rewards.stepwise, **ENV)
    env.reset(options={"index": 2})
    assert vector.play([[7, 8, 9, 10, 11]]).rewards[0].tobytes() == env.play([7, 8, 9, 10, 11])[0].tobytes()


def test_calls_out_of_order(make_vector: Make) -> None:
    vector = make_vector(2, 1, first_env=6)
    with pytest.raises(RuntimeError, match=r"play\(\) before reset\(\): environment 6"):
        vector.play([[A], [A]])
    vector.reset(options={"reset_mask": [True, False]})
    with pytest.raises(RuntimeError, match=r"step\(\) before reset\(\): environment 7"):
        vector.step([A, A])
    vector.close()
    with pytest.raises(RuntimeError, match="closed"):
        vector.reset()


def test_arguments_that_do_not_fit(make_vector: Make) -> None:
    vector = make_vector(2, 1)
    for options in [{"indices": [0]}, {"indices": [0, 7]}, {"indices": [0.0, 1.0]}, {"reset_mask": [True]}]:
        with pytest.raises(ValueError, match=r"must be"):
            vector.reset(options=options)
    with pytest.raises(TypeError, match="indexes"):
        vector.reset(options={"indexes": [0, 1]})
    vector.reset()
    for actions in [[A], [1.0, 2.0], [[A, A]]]:
        with pytest.raises(ValueError, match="actions must be 2 integers"):
            vector.step(actions)
    with pytest.raises(ValueError, match="1 responses for 2 environments"):
        vector.play([[A]])
    for arguments in [(0, 1), (1, 0)]:
        with pytest.raises(ValueError, match="at least 1"):
            make_vector(*arguments)
