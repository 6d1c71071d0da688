"""The `alg` section: one dataclass per algorithm, chosen by alg.id.

A new algorithm is a new dataclass with its own `id: Literal[...]` and `args`, added to `Algorithm`. As in
train.config, the docstring below a field is its help text and its type carries the range.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from train.config_args import A2CArgs, GRPOArgs, PPOArgs, TRPOArgs
from train.config_policy import MASK_KEYS, KLDiv, Lora, Policy, PolicyArgs, generate_kwargs


@dataclass(frozen=True, kw_only=True)
class RLAlg:
    """What every algorithm but supervised training has."""

    kl_div: KLDiv
    """Penalty for leaving the reference model."""
    policy: Policy
    """Policy and critic."""

    def __post_init__(self) -> None:
        self.settle_kl()
        name = type(self).__name__.removesuffix("Alg")
        defaults = {f.name: f.default for f in dataclasses.fields(PolicyArgs)}
        masks = [key for key in MASK_KEYS if getattr(self.policy.args, key) != defaults[key]]
        if masks or self.policy.id.startswith("maskable_"):
            named = ", ".join(f"policy.args.{key}" for key in masks) or f"policy.id {self.policy.id}"
            raise ValueError(f"{named}: {name} has no action mask; use train/nlpo.py with alg.id nlpo")
        if self.kl_div.in_loss and name in ("A2C", "TRPO"):
            raise ValueError(f"kl_div.in_loss: {name} takes the KL off the reward only; leave it out or false")

    def settle_kl(self, in_loss: bool = False) -> None:
        """Where the KL goes if kl_div.in_loss is null."""
        if self.kl_div.in_loss is None:
            object.__setattr__(self, "kl_div", dataclasses.replace(self.kl_div, in_loss=in_loss))


@dataclass(frozen=True, kw_only=True)
class PPOAlg(RLAlg):
    id: Literal["ppo"]
    """Algorithm."""
    args: PPOArgs = field(default_factory=PPOArgs)
    """Hyper-parameters of the algorithm."""


@dataclass(frozen=True, kw_only=True)
class NLPOAlg(RLAlg):
    id: Literal["nlpo"]
    """Algorithm."""
    args: PPOArgs = field(default_factory=PPOArgs)
    """Hyper-parameters of the algorithm, the same as PPO's."""

    def __post_init__(self) -> None:
        self.settle_kl()
        size, kind = self.policy.args.top_mask, self.policy.args.mask_type
        if size is None:
            raise ValueError("policy.args.top_mask is required: the size of NLPO's mask")
        if kind == "learned_top_p" and size > 1:
            raise ValueError(f"policy.args.top_mask {size:g}: a probability, at most 1, with mask_type learned_top_p")
        if kind != "learned_top_p" and (size < 1 or size != int(size)):
            raise ValueError(f"policy.args.top_mask {size:g}: a number of tokens, 1 or more, with mask_type {kind}")


@dataclass(frozen=True, kw_only=True)
class A2CAlg(RLAlg):
    id: Literal["a2c"]
    """Algorithm."""
    args: A2CArgs = field(default_factory=A2CArgs)
    """Hyper-parameters of the algorithm."""


@dataclass(frozen=True, kw_only=True)
class TRPOAlg(RLAlg):
    id: Literal["trpo"]
    """Algorithm."""
    args: TRPOArgs = field(default_factory=TRPOArgs)
    """Hyper-parameters of the algorithm."""

    def __post_init__(self) -> None:
        RLAlg.__post_init__(self)
        if self.policy.args.gradient_checkpointing:
            raise ValueError("policy.args.gradient_checkpointing: TRPO differentiates twice, through what was kept")


@dataclass(frozen=True, kw_only=True)
class GRPOAlg(RLAlg):
    id: Literal["grpo"]
    """Algorithm."""
    args: GRPOArgs = field(default_factory=GRPOArgs)
    """Hyper-parameters of the algorithm."""

    def __post_init__(self) -> None:
        estimator = self.args.advantage_estimator
        if self.kl_div.norm_reward:
            raise ValueError("kl_div.norm_reward: the advantages of GRPO are normalised already; leave it out")
        self.settle_kl(in_loss=estimator == "grpo")
        RLAlg.__post_init__(self)
        if self.policy.args.value_model != "separate":
            raise ValueError("policy.args.value_model: GRPO has no critic; leave it out")
        if self.args.gamma != 1 and estimator != "reinforce_plus_plus":
            raise ValueError(f"args.gamma: {estimator} does not discount; leave it out, or take reinforce_plus_plus")
        if not self.args.scale_rewards and estimator != "grpo":
            raise ValueError(f"args.scale_rewards: {estimator} never divides by a group's deviation; leave it out")


@dataclass(frozen=True, kw_only=True)
class SupervisedAlg:
    id: Literal["supervised"]
    """Algorithm."""
    model_type: Literal["causal", "seq2seq"]
    """Kind of model."""
    model_name: str
    """Hub name or folder of the model to train."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""
    training_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of transformers' TrainingArguments; any key."""
    loss_on_prompt: bool = False
    """Train the prompt's tokens too, not the reference's alone (causal models)."""
    separator: str = " "
    """Goes between prompt and reference unless one of them has white space there (causal models)."""
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `generate` in evaluation; any key. min_length counts new tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "generation_kwargs", generate_kwargs(self.generation_kwargs))


Algorithm = PPOAlg | NLPOAlg | A2CAlg | TRPOAlg | GRPOAlg | SupervisedAlg
