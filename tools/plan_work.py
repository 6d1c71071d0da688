"""How much a configuration does at a time: rows and tokens of rollouts, micro-batches and evaluations."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algorithms.policy import LanguageModel
from algorithms.sampling import MaskSpec, SamplingSpec
from algorithms.trust_region import trainable
from train.config import Config, NLPOAlg, RLAlg, SupervisedAlg, TRPOAlg
from train.supervised_data import token_losses

UNKNOWN_PROMPT = 512
"""Tokens of a prompt where neither the configuration nor the model limits them."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Tokens of the longest prompt and response; all rows are planned with these.

    n_envs: episodes at a time. episodes: of a rollout and rank. micro_rows: of a micro-batch in scoring, step_rows: in
    the update, where an optimizer step may have fewer. micro_batches: of a step. steps: of an iteration, at most a few.
    rollout: False in supervised training. policy_numbers: parameters that TRPO moves, else 0.
    """

    prompt: int
    response: int
    n_envs: int = 0
    episodes: int = 0
    micro_rows: int = 0
    step_rows: int = 1
    micro_batches: int = 1
    steps: int = 1
    eval_rows: int = 0
    rollout: bool = True
    kl_in_loss: bool = False
    recomputes: bool = False
    policy_numbers: int = 0
    spec: Any = None

    @staticmethod
    def of(config: Config, policy: LanguageModel, shares: int) -> "Work":
        """What one rank does."""
        alg, limits = config.alg, config.env.args
        response = limits.max_episode_length
        prompt = _longest_prompt(config, policy)
        if isinstance(alg, SupervisedAlg):
            given = alg.training_args
            return Work(
                prompt=prompt,
                response=response,
                step_rows=given.get("per_device_train_batch_size", 8),
                micro_batches=given.get("gradient_accumulation_steps", 1),
                recomputes=given.get("gradient_checkpointing", False),
                rollout=False,
            )
        episodes = config.env.n_envs * math.ceil(alg.args.n_steps / response)
        tokens = alg.args.n_steps * config.env.n_envs
        batch = getattr(alg.args, "batch_size", tokens)
        steps = min(math.ceil(tokens / batch), episodes)
        rows = math.ceil(episodes / steps)
        if isinstance(alg, TRPOAlg):
            rows = episodes  # of its policy's step, the largest
        micro = min(alg.args.micro_batch_size, rows)
        limit = config.train_evaluation.max_eval_samples or config.train_evaluation.eval_batch_size
        return Work(
            prompt=prompt,
            response=response,
            n_envs=config.env.n_envs,
            episodes=episodes,
            micro_rows=min(alg.args.micro_batch_size, episodes),
            step_rows=micro,
            micro_batches=math.ceil(rows / micro),
            steps=steps,
            eval_rows=min(config.train_evaluation.eval_batch_size, math.ceil(limit / shares)),
            kl_in_loss=bool(alg.kl_div.in_loss),
            policy_numbers=sum(p.numel() for p in trainable(policy)) if isinstance(alg, TRPOAlg) else 0,
            spec=_spec(config),
        )

    def masks(self, policy: LanguageModel) -> int:
        """Bytes of the action masks of a rollout; 0 where nothing is ever forbidden."""
        width = math.ceil(policy.vocab_size / 8) if self.spec is not None and self.spec.restricts else 0
        return self.episodes * self.response * width

    def inputs(self, rows: int, policy: LanguageModel) -> dict[str, Tensor | None]:
        """Arguments of a forward of policy and critic, on the device in force."""
        prompt, response = (torch.ones(rows, n, dtype=torch.int64) for n in (self.prompt, self.response))
        masks = None
        if self.spec is not None and self.spec.restricts:
            masks = torch.ones(*response.shape, math.ceil(policy.vocab_size / 8), dtype=torch.uint8)
        return {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "response_ids": response,
            "response_mask": response.bool(),
            "action_mask": masks,
        }

    def supervised_loss(self, policy: LanguageModel) -> Tensor:
        """Of a batch of supervised training, as its trainer computes it."""
        seq2seq = policy.start_token_id is not None
        ids = torch.ones(self.step_rows, self.prompt + (0 if seq2seq else self.response), dtype=torch.int64)
        inputs, labels = {"input_ids": ids, "attention_mask": ids}, ids
        if seq2seq:
            labels = torch.ones(self.step_rows, self.response, dtype=torch.int64)
            inputs["decoder_input_ids"] = labels
        losses, _ = token_losses(policy.lm(**inputs, use_cache=False).logits, labels, seq2seq=seq2seq)
        return losses.sum()


def _longest_prompt(config: Config, policy: LanguageModel) -> int:
    limits = config.env.args
    start = 0 if policy.start_token_id is not None else int(limits.context_start_token is not None)
    if limits.max_prompt_length is not None:
        return limits.max_prompt_length + start
    positions = getattr(policy.lm.config.get_text_config(), "max_position_embeddings", None)
    room = positions and positions - (0 if policy.start_token_id is not None else limits.max_episode_length)
    return max(1, min(room or UNKNOWN_PROMPT, 10**6))


def _spec(config: Config) -> SamplingSpec:
    """As `train.environments.make_spec` has it, without a tokenizer."""
    assert isinstance(config.alg, RLAlg)
    args = config.alg.policy.args
    kwargs, mask = args.generation_kwargs, None
    if isinstance(config.alg, NLPOAlg):
        mask = MaskSpec(mask_type=args.mask_type, size=args.top_mask, min_tokens_to_keep=args.min_tokens_to_keep)
    return SamplingSpec(
        max_new_tokens=config.env.args.max_episode_length,
        min_new_tokens=kwargs.min_new_tokens,
        temperature=kwargs.temperature,
        top_k=kwargs.top_k or 0,
        top_p=kwargs.top_p,
        forced_bos_token_id=kwargs.forced_bos_token_id,
        forced_eos_token_id=kwargs.forced_eos_token_id,
        mask=mask,
    )
