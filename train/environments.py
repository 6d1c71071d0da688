"""The environments of a rank: their data, their worker processes, their reward, and how responses are sampled."""

import hashlib
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from algorithms.policy import LanguageModel
from algorithms.sampling import MaskSpec, SamplingSpec
from envs import registry
from envs.metrics import METRICS
from envs.rewards import REWARDS
from envs.samples import write_samples
from envs.tasks import TASKS
from envs.vector import TextVectorEnv
from train.config import Config, GRPOAlg, NLPOAlg
from train.distributed import Ranks
from train.generation import check_generation_kwargs
from train.loading import prompt_limit
from train.rollout import Sampler

SPLITS = ("train", "val", "test")
DEVICE_REWARDS = {"learned_reward": "algorithms.reward_model:LearnedReward"}


def make_sampler(
    config: Config, ranks: Ranks, folder: Path, tokenizer: PreTrainedTokenizerBase, policy: LanguageModel
) -> Sampler:
    """The environments with their workers, and how responses are sampled."""
    env = config.env
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    device_reward = make_device_reward(config, ranks)
    paths, fingerprint = write_data(config, ranks, folder, tokenizer)
    envs = make_envs(
        config,
        ranks,
        paths,
        seed=config.alg.args.seed,
        on_device=device_reward is not None,
        vocab_size=policy.vocab_size,
        eos_token_ids=eos,
        pad_token_id=tokenizer.pad_token_id,
        max_prompt_length=prompt_limit(config, tokenizer, policy),
        max_episode_length=env.args.max_episode_length,
        terminate_on_eos=env.args.terminate_on_eos,
        context_start_token=None if policy.start_token_id is not None else env.args.context_start_token,
        prompt_truncation_side=env.args.prompt_truncation_side,
        priority_scale=env.args.priority_scale,
        empty_prompt_token=next(iter([x for x in (tokenizer.bos_token_id, *eos) if x is not None]), None),
    )
    return Sampler(
        envs=envs,
        data=fingerprint,
        spec=make_spec(config, tokenizer, policy.vocab_size),
        eos_token_ids=eos,
        stop_on_eos=env.args.terminate_on_eos,
        pad_token_id=tokenizer.pad_token_id,
        seed=config.alg.args.seed,
        first_env=ranks.rank * env.n_envs,
        group_size=config.alg.args.num_generations if isinstance(config.alg, GRPOAlg) else 1,
        device_reward=device_reward,
    )


def make_envs(
    config: Config, ranks: Ranks, paths: dict[str, Any], *, seed: int, on_device: bool, **env_args: Any
) -> TextVectorEnv:
    """This rank's environments and their workers. env_args: of each environment (see envs.text_env.TextEnv)."""
    env, reward = config.env, config.reward_fn
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A worker is not even to look at a device's reward: that would import torch there.
    in_worker = None if reward is None or on_device else {"id": reward.id, "args": reward.args}
    return TextVectorEnv(
        env.n_envs,
        env.n_workers or min(env.n_envs, max(1, cores // ranks.local_world_size)),
        init={**paths, "reward": in_worker, "env": env_args},
        timeout=env.timeout,
        max_failures=env.max_worker_failures,
        first_env=ranks.rank * env.n_envs,
        seed=seed,
    )


def make_metrics(config: Config) -> list[Any]:
    """The metrics of train_evaluation.metrics, in their order."""
    specs = config.train_evaluation.metrics
    return [registry.build(spec.id, spec.args, METRICS, "metric", given=("episodes",)) for spec in specs]


def make_spec(config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> SamplingSpec:
    """How responses are sampled in rollouts. Raises ValueError for a forced token that is none."""
    policy = config.alg.policy.args
    generation = policy.generation_kwargs
    check_generation_kwargs(vars(generation), "alg.policy.args.generation_kwargs", vocab_size)
    mask = None
    if isinstance(config.alg, NLPOAlg):
        special = tokenizer.all_special_ids if policy.keep_special_tokens == "all" else [tokenizer.eos_token_id]
        mask = MaskSpec(
            mask_type=policy.mask_type,
            size=policy.top_mask,
            min_tokens_to_keep=policy.min_tokens_to_keep,
            always_allowed=tuple(token for token in special if token is not None),
        )
    return SamplingSpec(
        max_new_tokens=config.env.args.max_episode_length,
        min_new_tokens=generation.min_new_tokens,
        temperature=generation.temperature,
        top_k=generation.top_k or 0,
        top_p=generation.top_p,
        forced_bos_token_id=generation.forced_bos_token_id,
        forced_eos_token_id=generation.forced_eos_token_id,
        mask=mask,
    )


def make_device_reward(config: Config, ranks: Ranks) -> Any:
    """The reward, if it is one that runs where the models are; else None."""
    known = REWARDS | DEVICE_REWARDS
    if not getattr(registry.resolve(config.reward_fn.id, known, "reward"), "on_device", False):
        return None
    given = {**config.reward_fn.args, "device": ranks.device}
    return registry.build(config.reward_fn.id, given, known, "reward", given=("episodes",))


def write_data(
    config: Config, ranks: Ranks, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], str]:
    """Samples and tokenizer as files for the workers, written by rank 0: (their paths, fingerprint of the samples)."""
    data = folder / "data"
    problem, fingerprint = None, hashlib.sha256()
    if ranks.is_main:
        try:
            data.mkdir(parents=True, exist_ok=True)
            task = registry.build(config.datapool.id, config.datapool.args, TASKS, "task", given=("split",))
            for split in SPLITS:
                write_samples(data / f"{split}.jsonl", task(split=split))
                with (data / f"{split}.jsonl").open("rb") as file:
                    while block := file.read(2**20):
                        fingerprint.update(block)
            tokenizer.backend_tokenizer.save(str(data / "tokenizer.json"))
        except Exception as error:  # the other ranks wait for these files: they have to stop too
            problem = error
    failed, digest = ranks.broadcast((problem is not None, fingerprint.hexdigest()))
    if failed:
        raise problem or RuntimeError("rank 0 could not prepare the data; its message says why")
    splits = {split: str(data / f"{split}.jsonl") for split in SPLITS}
    return {"tokenizer": str(data / "tokenizer.json"), "splits": splits}, digest
