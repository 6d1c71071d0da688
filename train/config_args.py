"""Hyper-parameters: `alg.args` of each algorithm.

As in train.config, the docstring below a field is its help text and its type carries the range.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from train.config_types import Count, Fraction, Natural, NonNegative, Positive, Range, Share


@dataclass(frozen=True, kw_only=True)
class RolloutArgs:
    """What every algorithm has."""

    n_steps: Count = 2048
    """Response tokens per environment and iteration."""
    micro_batch_size: Count = 16
    """Episodes in one forward and backward pass. Changes memory and speed, not the gradient."""
    gamma: Share = 0.99
    """Discount per token."""
    max_grad_norm: Positive = 0.5
    """Gradients are clipped to this norm, policy and critic together."""
    learning_rate: NonNegative = 3e-4
    """Learning rate of the policy."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rates over n_iters, after the warm-up: to 0, unless constant."""
    warmup_iterations: Natural = 0
    """Iterations in which the learning rates rise linearly."""
    verbose: int = 1
    """Ignored; kept for RL4LMs' files."""
    seed: Natural = 0
    """Seed of everything random in the run."""


@dataclass(frozen=True, kw_only=True)
class CriticArgs(RolloutArgs):
    """What the algorithms with a critic have."""

    ent_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""
    critic_learning_rate: NonNegative | None = None
    """Learning rate of the critic; null = learning_rate."""
    normalize_advantage: bool = True
    """Give advantages mean 0 and standard deviation 1, over all ranks."""


@dataclass(frozen=True, kw_only=True)
class ClippedArgs:
    """What the algorithms with several clipped updates per rollout have."""

    batch_size: Count = 64
    """Response tokens per optimizer step and rank."""
    n_epochs: Count = 10
    """Passes over each rollout."""
    clip_range: Positive = 0.2
    """Clip of the probability ratio: [1 - c, 1 + c]."""
    clip_range_high: Positive | None = None
    """Another c for the upper side (clip-higher); null = clip_range."""
    dual_clip: Annotated[float, Range(1, open_low=True)] | None = None
    """Where the advantage is negative, the ratio counts as at most this (dual clip, e.g. 3); null = no limit."""
    target_kl: Positive | None = None
    """Stop an iteration's updates when the KL to the sampling policy exceeds 1.5 times this, in nats; null = never."""


@dataclass(frozen=True, kw_only=True)
class PPOArgs(ClippedArgs, CriticArgs):
    clip_range_vf: Positive | None = None
    """Clip of the change of the value prediction, in units of the return; null = none."""
    clip_vf_max: bool = False
    """With clip_range_vf: the larger of the clipped and the unclipped error (OpenAI's code) instead of the clipped."""
    advantage_scope: Literal["minibatch", "batch"] = "minibatch"
    """Tokens over which advantages are normalised."""
    critic_warmup_iterations: Natural = 0
    """First iterations in which the critic alone is trained."""

    def __post_init__(self) -> None:
        if self.clip_vf_max and self.clip_range_vf is None:
            raise ValueError("clip_vf_max needs clip_range_vf: without it no error is clipped")


@dataclass(frozen=True, kw_only=True)
class A2CArgs(CriticArgs):
    n_steps: Count = 5
    """Response tokens per environment and iteration, all of them in the iteration's one optimizer step."""
    gae_lambda: Fraction = 1.0
    """Lambda of generalised advantage estimation."""
    normalize_advantage: bool = False
    """Give advantages mean 0 and standard deviation 1, over all ranks."""
    learning_rate: NonNegative = 7e-4
    """Learning rate of the policy."""
    use_rms_prop: bool = True
    """RMSprop (alpha 0.99) as optimizer, if alg.policy.args.optimizer_class is null; else AdamW. RMSprop does not
    correct its first averages, so its first steps are ten times as long as the learning rate: warm up."""
    rms_prop_eps: Positive = 1e-5
    """Epsilon of RMSprop."""


@dataclass(frozen=True, kw_only=True)
class TRPOArgs(RolloutArgs):
    batch_size: Count = 128
    """Response tokens per optimizer step of the critic and rank."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    normalize_advantage: bool = True
    """Give advantages mean 0 and standard deviation 1, over all tokens of all ranks."""
    learning_rate: NonNegative = 1e-3
    """Learning rate of the critic; the policy's step follows from target_kl."""
    target_kl: Positive = 0.01
    """Largest mean KL between the old and the new policy, in nats per token."""
    n_critic_updates: Natural = 10
    """Passes of the critic over each rollout."""
    cg_max_steps: Count = 15
    """Most steps of the conjugate gradient."""
    cg_damping: NonNegative = 0.1
    """Multiple of the identity added to the Fisher matrix."""
    line_search_shrinking_factor: Annotated[float, Range(0, 1, open_low=True)] = 0.8
    """The step is multiplied by this until it is accepted."""
    line_search_max_iter: Count = 10
    """Most step lengths tried; if none is accepted the policy stays as it was."""
    sub_sampling_factor: Count = 1
    """The Fisher matrix is of every n-th token."""


@dataclass(frozen=True, kw_only=True)
class GRPOArgs(ClippedArgs, RolloutArgs):
    ent_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    num_generations: Count = 8
    """Responses to each prompt: env.n_envs is a multiple of it."""
    n_epochs: Count = 1
    """Passes over each rollout."""
    gamma: Share = 1.0
    """Discount per token; only reinforce_plus_plus has one."""
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """grpo: reward less the group's mean, over its standard deviation. rloo: less the mean of the others in the group.
    reinforce_plus_plus: discounted rewards to go, normalised over the whole batch."""
    scale_rewards: bool = True
    """grpo: divide by the group's standard deviation (Dr. GRPO does not)."""
    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """Sum of the loss over tokens divided by: their number; each response's length, then the number of responses (GRPO
    as published); responses times env.args.max_episode_length (Dr. GRPO, without a bias to any length)."""
