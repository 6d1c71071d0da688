"""The part of the `alg` section that all algorithms share: the policy, how it samples, and the KL to the reference.

As in train.config, the docstring below a field is its help text and its type carries the range.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from train.config_loader import unknown
from train.config_types import Count, Natural, NonNegative, Positive, Range, Share, Side

POLICIES = ("causal_lm_actor_critic_policy", "seq2seq_lm_actor_critic_policy")
MASKED_POLICIES = tuple(f"maskable_{name}" for name in POLICIES)
MASK_KEYS = ("top_mask", "mask_type", "target_update_iterations", "min_tokens_to_keep", "keep_special_tokens")


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
    forced_bos_token_id: Natural | None = None
    """The only token allowed as the first of a response, as in mBART; a checkpoint's own setting never applies."""
    forced_eos_token_id: Natural | None = None
    """The only token allowed as the last of a response of max_new_tokens, as in BART."""
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
class Lora:
    r: Count = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """Their scale: they are multiplied by alpha / r."""
    target_modules: tuple[str, ...] | Literal["all-linear"] | None = None
    """Names of the layers that get one, or all-linear; null = what peft has for the model's family."""
    save_merged: bool = False
    """Write the model at the end with the adapters merged in, instead of the adapters alone."""


@dataclass(frozen=True, kw_only=True)
class PolicyArgs:
    model_name: str
    """Hub name or folder of the language model to train; its copy is the frozen reference."""
    value_model: Literal["separate", "shared"] = "separate"
    """Critic: its own copy of the model, or a head on the policy's hidden states. GRPO has none."""
    lora: Lora | None = None
    """Train adapters instead of all weights; the reference is the same base with the adapter of the start."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    logits_chunk_mb: Count = 256
    """Most memory for one chunk of fp32 logits, in MiB."""
    apply_model_parallel: bool = False
    """RL4LMs' name of device_map balanced, where a process has several GPUs of its own; on one it does nothing."""
    device_map: Literal["auto", "balanced", "sequential"] | dict[str, Any] | None = None
    """Spread each model over the GPUs of its process (distributed.gpus_per_process), or say which module goes where:
    {module: device}. null = a model stays on one GPU."""
    max_memory: dict[str, Any] | None = None
    """Most memory that device_map may fill, by device: {0: 10GiB, 1: 20GiB}; null = what is free."""
    reference_device: Literal["cpu", "disk"] | None = None
    """Where the weights of the reference wait for their turn, a layer at a time: exact, less memory, slower."""
    reference_quantization: Literal["int8", "int4"] | None = None
    """Keep the reference's weights in so many bits: less memory, and a KL that is off by the rounding; null = exact."""
    optimizer_class: str | None = None
    """Class in torch.optim, or the path `module:attr`; null = AdamW, or RMSprop for A2C with use_rms_prop."""
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer, without learning rate and weight decay; any key."""
    weight_decay: NonNegative = 1e-6
    """Weight decay of all but biases and norms."""
    prompt_truncation_side: Side | None = None
    """RL4LMs' second copy of env.args.prompt_truncation_side, which it must equal."""
    generation_kwargs: GenerationArgs = field(default_factory=GenerationArgs)
    """How responses are sampled in rollouts, and in evaluation unless train_evaluation.generation_kwargs is given."""
    top_mask: Positive | None = None
    """NLPO only, required there: size of the mask, a probability (learned_top_p) or a number of tokens."""
    mask_type: Literal["learned_top_k", "learned_top_p", "topk"] = "learned_top_k"
    """NLPO only: the mask policy's likeliest tokens by number or probability, or the policy's own by number (topk)."""
    target_update_iterations: Count = 1000
    """NLPO only: iterations between two updates of the mask policy, which then becomes the policy."""
    min_tokens_to_keep: Count = 1
    """NLPO only: fewest tokens that a mask holds (RL4LMs' default was 100, inert below a top_k of 100)."""
    keep_special_tokens: Literal["eos", "all"] = "eos"
    """NLPO only: special tokens that every mask holds; RL4LMs kept all."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    id: str = "causal_lm_actor_critic_policy"
    """causal_lm_actor_critic_policy or seq2seq_lm_actor_critic_policy (NLPO: with maskable_ before it)."""
    args: PolicyArgs
    """The models, their optimizer and how they generate."""

    def __post_init__(self) -> None:
        if self.id not in POLICIES + MASKED_POLICIES:
            raise ValueError(unknown("id", self.id, POLICIES + MASKED_POLICIES))

    @property
    def is_seq2seq(self) -> bool:
        """Whether the policy is a sequence-to-sequence model."""
        return "seq2seq" in self.id


@dataclass(frozen=True, kw_only=True)
class KLDiv:
    coeff: NonNegative
    """Penalty per token and nat of KL to the reference, taken off the reward; the first value if target_kl is set."""
    target_kl: Positive | None = None
    """KL per token, in nats, that coeff is adapted to; null = constant coeff."""
    norm_reward: bool = False
    """Give the rewards of each rollout mean 0 and standard deviation 1."""
    in_loss: bool | None = None
    """Add coeff times the KL to the loss instead of taking it off the reward (PPO, NLPO, GRPO); null = with
    advantage_estimator grpo only, which would make as much of a little KL as of the whole reward."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimate of the KL per token: k1 = log ratio, k2 = k1²/2, k3 = exp(-k1) - 1 + k1; null = k1, in the loss k3."""

    def __post_init__(self) -> None:
        if self.in_loss is None:  # the algorithm will say
            return
        if self.estimator is None:
            object.__setattr__(self, "estimator", "k3" if self.in_loss else "k1")
        if self.in_loss and self.estimator == "k1":
            raise ValueError(
                "in_loss (the default of grpo) with estimator k1 does nothing: its gradient is zero on average; "
                "take k2 or k3"
            )
        if self.in_loss and self.norm_reward:
            raise ValueError("norm_reward normalises rewards with the KL in them; with in_loss there is none in them")
