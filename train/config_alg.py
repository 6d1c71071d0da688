"""The `alg` section: one dataclass per algorithm, chosen by alg.id.

A new algorithm is a new dataclass with its own `id: Literal[...]` and `args`, added to `Algorithm`. As in
train.config, the docstring below a field is its help text and its type carries the range.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from train.config_loader import unknown
from train.config_types import Count, Fraction, Natural, NonNegative, Positive, Range, Share, Side

POLICIES = ("causal_lm_actor_critic_policy", "seq2seq_lm_actor_critic_policy")
MASKED_POLICIES = tuple(f"maskable_{name}" for name in POLICIES)
MASK_KEYS = ("top_mask", "mask_type", "target_update_iterations", "min_tokens_to_keep")


def generate_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """RL4LMs' free generation keywords as `generate` takes them: min_length counts new tokens there."""
    result = dict(kwargs)
    if result.pop("post_processing_fn", None) is not None:
        raise ValueError("generation_kwargs.post_processing_fn is not available; leave it out or null")
    if result.get("min_length") is not None:
        fewest = result.pop("min_length")
        if result.setdefault("min_new_tokens", fewest) != fewest:
            raise ValueError("generation_kwargs: min_length and min_new_tokens mean the same; give one of them")
    return result


@dataclass(frozen=True, kw_only=True)
class GenerationArgs:
    do_sample: Literal[True] = True
    """Rollouts always sample."""
    top_k: Natural | None = None
    """Sample among the k likeliest tokens; null or 0 = all (RL4LMs' GPT-2 files relied on the library's hidden 50)."""
    top_p: Share = 1.0
    """Sample among the smallest set of tokens with this probability."""
    temperature: Positive = 1.0
    """Divides the logits, in sampling and in scoring."""
    min_length: Natural | None = None
    """RL4LMs' name of min_new_tokens; fills it in."""
    min_new_tokens: Natural = 0
    """EOS is not sampled before this many response tokens."""
    max_new_tokens: Count | None = None
    """Longest response, in tokens; null = env.args.max_episode_length, which it must equal."""
    num_beams: Literal[1] = 1
    """Rollouts have no beam search; train_evaluation.generation_kwargs may."""
    length_penalty: Annotated[float, Range(1, 1)] = 1.0
    """Of beam search only; belongs to train_evaluation.generation_kwargs."""

    def __post_init__(self) -> None:
        if self.min_length is not None:
            if self.min_new_tokens not in (0, self.min_length):
                raise ValueError(f"min_length {self.min_length} and min_new_tokens {self.min_new_tokens} contradict")
            object.__setattr__(self, "min_new_tokens", self.min_length)


@dataclass(frozen=True, kw_only=True)
class PolicyArgs:
    model_name: str
    """Hub name or folder of the language model to train; its copy is the frozen reference."""
    value_model: Literal["separate", "shared"] = "separate"
    """Critic: its own copy of the model, or a head on the policy's hidden states."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    logits_chunk_mb: Count = 256
    """Most memory for one chunk of fp32 logits, in MiB."""
    apply_model_parallel: bool = True
    """Ignored, kept for RL4LMs' files: a model stays on one GPU of its process."""
    optimizer_class: str = "AdamW"
    """Class in torch.optim, or the path `module:attr`."""
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer, without learning rate and weight decay; any key."""
    weight_decay: NonNegative = 1e-6
    """Weight decay of all but biases and norms."""
    prompt_truncation_side: Side | None = None
    """RL4LMs' second copy of env.args.prompt_truncation_side, which it must equal."""
    generation_kwargs: GenerationArgs = field(default_factory=GenerationArgs)
    """How responses are sampled in rollouts, and in evaluation unless train_evaluation.generation_kwargs is given."""
    top_mask: Positive | None = None
    """NLPO only: size of the mask, a probability (learned_top_p) or a number of tokens (learned_top_k)."""
    mask_type: Literal["learned_top_k", "learned_top_p", "topk"] = "learned_top_k"
    """NLPO only: how the mask is made."""
    target_update_iterations: Count = 1000
    """NLPO only: iterations between two updates of the mask policy."""
    min_tokens_to_keep: Count = 100
    """NLPO only: fewest tokens that a mask allows."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    id: str = "causal_lm_actor_critic_policy"
    """causal_lm_actor_critic_policy or seq2seq_lm_actor_critic_policy (NLPO: with maskable_ before it)."""
    args: PolicyArgs
    """The models, their optimizer and how they generate."""

    def __post_init__(self) -> None:
        if self.id not in POLICIES + MASKED_POLICIES:
            raise ValueError(unknown("id", self.id, POLICIES + MASKED_POLICIES))


@dataclass(frozen=True, kw_only=True)
class KLDiv:
    coeff: NonNegative
    """Penalty per token and nat of KL to the reference, taken off the reward; the first value if target_kl is set."""
    target_kl: Positive | None = None
    """KL per token, in nats, that coeff is adapted to; null = constant coeff."""
    norm_reward: bool = False
    """Give the rewards of each rollout mean 0 and standard deviation 1."""


@dataclass(frozen=True, kw_only=True)
class PPOArgs:
    n_steps: Count = 2048
    """Response tokens per environment and iteration."""
    batch_size: Count = 64
    """Response tokens per optimizer step and rank."""
    micro_batch_size: Count = 16
    """Episodes in one forward and backward pass. Changes memory and speed, not the gradient."""
    n_epochs: Count = 10
    """Passes over each rollout."""
    gamma: Share = 0.99
    """Discount per token."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    clip_range: Positive = 0.2
    """Clip of the probability ratio: [1 - c, 1 + c]."""
    clip_range_vf: Positive | None = None
    """Clip of the change of the value prediction, in units of the return; null = none."""
    normalize_advantage: bool = True
    """Give advantages mean 0 and standard deviation 1, over all ranks."""
    advantage_scope: Literal["minibatch", "batch"] = "minibatch"
    """Tokens over which they are normalised."""
    ent_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: Positive = 0.5
    """Gradients are clipped to this norm, policy and critic together."""
    target_kl: Positive | None = None
    """Stop an iteration's updates when the KL to the sampling policy exceeds 1.5 times this, in nats; null = never."""
    learning_rate: NonNegative = 3e-4
    """Learning rate of the policy."""
    critic_learning_rate: NonNegative | None = None
    """Learning rate of the critic; null = learning_rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of both learning rates over n_iters, after the warm-up: to 0, unless constant."""
    warmup_iterations: Natural = 0
    """Iterations in which both learning rates rise linearly."""
    verbose: int = 1
    """Ignored; kept for RL4LMs' files."""
    seed: Natural = 0
    """Seed of everything random in the run."""


@dataclass(frozen=True, kw_only=True)
class PPOAlg:
    id: Literal["ppo"]
    """Algorithm."""
    args: PPOArgs = field(default_factory=PPOArgs)
    """Hyper-parameters of the algorithm."""
    kl_div: KLDiv
    """Penalty for leaving the reference model."""
    policy: Policy
    """Policy and critic."""

    def __post_init__(self) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(PolicyArgs)}
        masks = [key for key in MASK_KEYS if getattr(self.policy.args, key) != defaults[key]]
        if masks or self.policy.id.startswith("maskable_"):
            named = ", ".join(f"policy.args.{key}" for key in masks) or f"policy.id {self.policy.id}"
            raise ValueError(f"{named}: PPO has no action mask; use train/nlpo.py with alg.id nlpo")


@dataclass(frozen=True, kw_only=True)
class SupervisedAlg:
    id: Literal["supervised"]
    """Algorithm."""
    model_type: Literal["causal", "seq2seq"]
    """Kind of model."""
    model_name: str
    """Hub name or folder of the model to train."""
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


Algorithm = PPOAlg | SupervisedAlg
