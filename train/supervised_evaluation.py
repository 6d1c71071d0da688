"""How supervised training generates the responses that it evaluates: with which settings, in which environments."""

from typing import Any

from algorithms.sampling import SamplingSpec
from train.config import Config
from train.distributed import Ranks
from train.environments import make_device_reward, make_envs
from train.generation import check_generation_kwargs
from train.rollout import Sampler
from train.supervised_data import IGNORED, Row, RowBuilder


def generation_kwargs(config: Config) -> dict[str, Any]:
    """alg.generation_kwargs (RL4LMs' place) or train_evaluation.generation_kwargs; greedy if neither is given.

    Raises ValueError if they differ or hold what generation does not know.
    """
    theirs, ours = config.alg.generation_kwargs, config.train_evaluation.generation_kwargs
    if theirs and ours and theirs != ours:
        raise ValueError(
            "alg.generation_kwargs and train_evaluation.generation_kwargs differ, and both say how responses are "
            "generated in evaluation: give one of them"
        )
    check_generation_kwargs(theirs, "alg.generation_kwargs")
    check_generation_kwargs(ours or {})
    return theirs or ours or {}


def prompt_limit(config: Config) -> int | None:
    """Longest prompt that the configuration allows, in tokens. Raises ValueError if it says so twice."""
    ours, theirs = config.tokenizer.max_length, config.env.args.max_prompt_length
    if ours and theirs and ours != theirs:
        raise ValueError(
            f"tokenizer.max_length ({ours}) and env.args.max_prompt_length ({theirs}) contradict: give one of them"
        )
    return ours or theirs


def lengths(
    builder: RowBuilder, rows: dict[str, list[Row]], asked: int | None, longest: int, positions: int | None
) -> tuple[int, int]:
    """(longest prompt, longest response) in evaluation, in tokens.

    asked: max_new_tokens of the generation_kwargs. Without it responses may be as long as the longest reference of val
    and test, at most `longest`, and at most half of what a causal model takes. positions: of the decoder, None = any.
    Raises ValueError if such responses leave no room for a prompt.
    """
    if (n_new := asked) is None:
        references = (sum(label != IGNORED for label in row["labels"]) for row in rows["val"] + rows["test"])
        n_new = min(max(references), longest)
        if not builder.seq2seq:
            n_new = max(1, min(n_new, builder.max_length // 2))
    room = builder.max_length
    if not builder.seq2seq:
        room -= n_new + (builder.context_start_token is not None)
    if room < 1 or n_new > (positions or n_new):
        raise ValueError(
            f"generation_kwargs.max_new_tokens ({n_new}) is too much for the model, which takes "
            f"{positions or builder.max_length} tokens" + ("" if builder.seq2seq else ", the prompt's included")
        )
    return min(builder.max_prompt_length or room, room), n_new


def make_sampler(
    config: Config,
    ranks: Ranks,
    builder: RowBuilder,
    data: tuple[dict[str, Any], str],
    limits: tuple[int, int],
    seed: int,
) -> Sampler:
    """Environments that score responses, with prompts as in training. data: see `write_data`; limits: see `lengths`."""
    tokenizer, reward = builder.tokenizer, config.reward_fn
    max_prompt_length, max_new_tokens = limits
    eos, pad = [tokenizer.eos_token_id], tokenizer.pad_token_id
    device_reward = None if reward is None else make_device_reward(config, ranks)
    paths, fingerprint = data
    envs = make_envs(
        config,
        ranks,
        paths,
        seed=seed,
        on_device=device_reward is not None,
        vocab_size=builder.vocab_size,
        eos_token_ids=eos,
        pad_token_id=pad,
        max_prompt_length=max_prompt_length,
        max_episode_length=max_new_tokens,
        terminate_on_eos=True,
        context_start_token=builder.context_start_token,
        prompt_truncation_side=tokenizer.truncation_side,
        empty_prompt_token=builder.empty_prompt_token,
    )
    return Sampler(
        envs=envs,
        data=fingerprint,
        spec=SamplingSpec(max_new_tokens=max_new_tokens, do_sample=False),
        eos_token_ids=eos,
        stop_on_eos=True,
        pad_token_id=pad,
        seed=seed,
        first_env=ranks.rank * config.env.n_envs,
        device_reward=device_reward,
    )
