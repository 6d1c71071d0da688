"""The token-level MDP in one process."""

import warnings
from typing import Any

import numpy as np
import pytest
import user_rewards
from gymnasium.utils.env_checker import check_env
from text_world import ENV, EOS, PAD, SAMPLES, START, make_tokenizer

from envs.samples import Sample
from envs.text_env import TextEnv

A, B, C, D, E, F = range(4, 10)


def make(reward: Any = None, samples: list[Sample] | None = None, with_eos: bool = False, **kwargs: Any) -> TextEnv:
    return TextEnv(make_tokenizer(with_eos), samples or SAMPLES, reward, **{**ENV, **kwargs})


@pytest.mark.parametrize("reward", [None, user_rewards.stepwise, user_rewards.Batched()])
@pytest.mark.parametrize("kwargs", [{}, {"context_start_token": START}, {"max_episode_length": 2, "priority_scale": 1}])
def test_gymnasium_accepts_it(reward: Any, kwargs: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*spec.*")  # it is not made by gymnasium.make
        check_env(make(reward, **kwargs), skip_render_check=True)


def test_prompt_is_padded_on_the_left_and_response_on_the_right() -> None:
    env = make()
    observation, info = env.reset(options={"index": 0})
    assert info == {"sample_id": "s0", "index": 0}
    assert observation["prompt_ids"].tolist() == [PAD, PAD, A, B]
    assert observation["prompt_mask"].tolist() == [0, 0, 1, 1]
    assert observation["response_mask"].tolist() == [0] * 6
    env.step(C)
    observation, *_ = env.step(np.int64(D))
    assert observation["response_ids"].tolist() == [C, D, PAD, PAD, PAD, PAD]
    assert observation["response_mask"].tolist() == [1, 1, 0, 0, 0, 0]
    assert observation["prompt_ids"].tolist() == [PAD, PAD, A, B]
    assert env.observation_space.contains(observation)


@pytest.mark.parametrize(
    ("side", "with_eos", "ids", "text"),
    [
        ("left", False, [C, D, E, F], "c d e f"),
        ("right", False, [A, B, C, D], "a b c d"),
        ("left", True, [D, E, F, EOS], "d e f"),
        ("right", True, [A, B, C, EOS], "a b c"),
    ],
)
def test_truncation_side(side: str, with_eos: bool, ids: list[int], text: str) -> None:
    env = make(with_eos=with_eos, prompt_truncation_side=side)
    observation, _ = env.reset(options={"index": 2})
    assert observation["prompt_ids"].tolist() == ids
    assert env.running().prompt_text == text


def test_a_prompt_that_fits_keeps_its_own_text() -> None:
    env = make(samples=[Sample("x", "  a   ü ")])
    env.reset()
    assert env.running().prompt_text == "  a   ü "


def test_the_tokenizers_own_padding_and_truncation_do_not_count() -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(1)
    env = TextEnv(tokenizer, SAMPLES, None, **ENV)
    assert env.begin(2).ids == [C, D, E, F]


def test_context_start_token_follows_the_prompt() -> None:
    env = make(context_start_token=START)
    observation, _ = env.reset(options={"index": 2})
    assert observation["prompt_ids"].tolist() == [C, D, E, F, START]
    observation, _ = env.reset(options={"index": 1})
    assert observation["prompt_ids"].tolist() == [PAD, PAD, PAD, C, START]
    assert observation["prompt_mask"].tolist() == [0, 0, 0, 1, 1]


def test_empty_prompts() -> None:
    empty = [Sample("nothing", "")]
    with pytest.raises(ValueError, match="'nothing'.*no tokens"):
        make(samples=empty).reset()
    assert make(samples=empty, empty_prompt_token=EOS).begin(0).ids == [EOS]
    assert make(samples=empty, context_start_token=START).begin(0).ids == [START]
    assert make(samples=empty, with_eos=True).begin(0).ids == [EOS]


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="special token 14"):
        make(pad_token_id=14)
    with pytest.raises(ValueError, match="no room"):
        make(with_eos=True, max_prompt_length=1)
    with pytest.raises(ValueError, match="max_episode_length"):
        make(max_episode_length=0)
    with pytest.raises(ValueError, match="prompt_truncation_side"):
        make(prompt_truncation_side="middle")
    with pytest.raises(ValueError, match="'s0'.*token 5.*only 5"):
        make(vocab_size=5).reset(options={"index": 0})


def test_end_of_sequence_terminates() -> None:
    env = make()
    env.reset(options={"index": 0})
    assert env.step(A)[2:4] == (False, False)
    *_, terminated, truncated, info = env.step(EOS)
    assert (terminated, truncated) == (True, False)
    assert info["episode"].response_ids == [A, EOS]
    assert info["episode"].response_text == "a"


def test_length_limit_truncates() -> None:
    env = make()
    env.reset()
    outcomes = [env.step(A)[2:4] for _ in range(6)]
    assert outcomes == [(False, False)] * 5 + [(False, True)]


def test_end_of_sequence_at_the_limit_terminates() -> None:
    env = make()
    env.reset()
    assert env.play([A] * 5 + [EOS])[1:] == (True, False)


def test_end_of_sequence_does_not_end_if_not_asked() -> None:
    env = make(terminate_on_eos=False)
    env.reset()
    assert env.play([A, EOS, B, EOS])[1:] == (False, False)
    assert env.play([EOS, EOS])[1:] == (False, True)


def test_any_of_several_end_tokens_terminates() -> None:
    env = make(eos_token_ids=[EOS, F])
    env.reset()
    assert env.play([A, F])[1:] == (True, False)


def test_calls_out_of_order() -> None:
    env = make()
    with pytest.raises(RuntimeError, match="reset"):
        env.step(A)
    env.reset(options={"index": 3})
    env.play([A, EOS])
    with pytest.raises(ValueError, match="'s3': 1 tokens, but the episode ends after 0"):
        env.step(A)


@pytest.mark.parametrize("ids", [[A, EOS, A], [A] * 7, [A, 14], [-1]])
def test_play_refuses_tokens_that_do_not_fit_and_changes_nothing(ids: list[int]) -> None:
    env = make()
    env.reset()
    with pytest.raises(ValueError, match=r"ends after|must be in \[0, 14\)"):
        env.play(ids)
    assert env.play([A, EOS])[1:] == (True, False)


def test_play_takes_integers_only() -> None:
    env = make()
    env.reset()
    with pytest.raises(TypeError):
        env.play([1.5])  # type: ignore[list-item]
    env.play(np.array([A, B]))
    assert all(type(token) is int for token in env.running().response_ids)


@pytest.mark.parametrize("reward", [user_rewards.stepwise, user_rewards.Batched(), user_rewards.seen])
@pytest.mark.parametrize("ids", [[A, B, EOS], [A] * 6, [A, B], [EOS], []])
def test_play_equals_step(reward: Any, ids: list[int]) -> None:
    one, other = make(reward), make(reward)
    one.reset(options={"index": 2})
    other.reset(options={"index": 2})
    rewards, terminated, truncated = one.play(ids)
    steps = [other.step(token) for token in ids]
    assert rewards.tolist() == [step[1] for step in steps]
    assert rewards.dtype == np.float64 and len(rewards) == len(ids)
    if ids:
        assert (terminated, truncated) == steps[-1][2:4]
    assert one.episode == other.episode


def test_play_goes_on_where_it_stopped() -> None:
    whole, parts = make(user_rewards.stepwise), make(user_rewards.stepwise)
    whole.reset(options={"index": 0})
    parts.reset(options={"index": 0})
    expected = whole.play([A, B, C, EOS])[0].tolist()
    assert [*parts.play([A])[0], *parts.play([])[0], *parts.play([B, C])[0], parts.step(EOS)[1]] == expected


def test_a_stepwise_reward_never_sees_the_future() -> None:
    env = make(user_rewards.seen)
    env.reset()
    assert env.play([A, B, C, EOS])[0].tolist() == [1, 2, 3, 4]


def test_exactly_one_terminal_reward() -> None:
    env = make(user_rewards.Batched())
    env.reset(options={"index": 2})
    assert env.play([A, B])[0].tolist() == [0, 0]
    assert env.play([A, EOS])[0].tolist() == [0, 2 * (1 / 3) + 2]
    assert env.play([])[0].tolist() == []


def test_same_seed_same_samples() -> None:
    one, other = make(), make()
    indices = [[env.reset(seed=seed)[1]["index"] for seed in range(20)] for env in (one, other)]
    assert indices[0] == indices[1]
    assert len(set(indices[0])) > 3
