"""Loading the policy, its critic and the frozen reference, and the optimizer groups of their weights."""

import contextlib
import copy
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)

from algorithms.adapters import attach, base_of
from algorithms.lora import LoraSpec, mirror
from algorithms.policy import ActorCritic, LanguageModel

_DROPOUT_NAMES = ("dropout", "pdrop", "drop_rate", "layerdrop", "jitter")


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Set every dropout rate of a model config to 0: the ratio of PPO is 1 at the first minibatch only without it."""
    for name, value in vars(config).items():
        if isinstance(value, float) and any(word in name for word in _DROPOUT_NAMES):
            setattr(config, name, 0.0)
        elif isinstance(value, PretrainedConfig):  # of an encoder or decoder of its own
            without_dropout(value)
    return config


def load_config(model_name: str, *, seq2seq: bool) -> PretrainedConfig:
    """The configuration of a model, or of the base of an adapter's folder.

    Raises ValueError for a model of the other kind, and for a base that is not there.
    """
    base = base_of(model_name)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(base)
    except OSError as error:
        if base == model_name:
            raise
        raise ValueError(f"{model_name} is an adapter of {base}, which cannot be loaded: {error}") from error
    if config.is_encoder_decoder != seq2seq:
        found, fix = ("a causal", "causal_lm") if seq2seq else ("a sequence-to-sequence", "seq2seq_lm")
        raise ValueError(
            f"alg.policy.id: {model_name} is {found} model (of type {config.model_type}); "
            f"set alg.policy.id to {fix}_actor_critic_policy (for NLPO maskable_{fix}_actor_critic_policy)"
        )
    return config


def load_pretrained(
    model_name: str, config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, lora: LoraSpec | None = None
) -> PreTrainedModel:
    """The model with a head that `config` (see `load_config`) describes, in eval mode.

    lora: adapters to train on a frozen base; without it everything is trained, and an adapter's folder is merged into
    its base first.
    """
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    loaded: Any = kind.from_pretrained(base_of(model_name), config=config, dtype=dtype, output_loading_info=True)
    lm: PreTrainedModel = loaded[0]
    found = loaded[1]
    if missing := sorted(found["missing_keys"]):  # they would be random, and different in the reference
        raise ValueError(f"{model_name} is no complete model: {len(missing)} weights are missing, as {missing[0]}")
    lm.eval()
    attach(lm, model_name, lora)
    return lm


def load_language_model(
    model_name: str,
    *,
    seq2seq: bool = False,
    decoder_start_token_id: int | None = None,
    dtype: torch.dtype = torch.float32,
    logits_chunk_mb: int = 256,
    lora: LoraSpec | None = None,
) -> LanguageModel:
    """A language model from a local folder or a hub name, or from an adapter's folder, without dropout, in eval mode.

    decoder_start_token_id: what a decoder reads first, if not what the model's configuration says.
    """
    original = load_config(model_name, seq2seq=seq2seq)
    if decoder_start_token_id is not None:
        original.decoder_start_token_id = decoder_start_token_id  # so that a saved model knows it
    lm = load_pretrained(model_name, without_dropout(copy.deepcopy(original)), dtype=dtype, lora=lora)
    return LanguageModel(
        lm,
        decoder_start_token_id=decoder_start_token_id,
        logits_chunk_mb=logits_chunk_mb,
        original_config=original,
    )


def load_reference(model_name: str, **options: Any) -> LanguageModel:
    """The policy as it was at iteration 0, frozen. Loaded from disk again, never copied from the policy.

    options: as of `load_language_model`. A policy with an adapter has a cheaper one: `adapters.reference_of`.
    """
    return load_language_model(model_name, **options).requires_grad_(False)


def load_actor_critic(
    model_name: str,
    *,
    value_model: str = "separate",
    gradient_checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    lora: LoraSpec | None = None,
    **options: Any,
) -> ActorCritic:
    """Policy and critic, both starting from `model_name`; options: others of `load_language_model`.

    value_model: "separate" (two trunks, with an adapter each if `lora` is given), "shared" (one), or "none".
    """
    policy = load_language_model(model_name, dtype=dtype, lora=lora, **options)
    critic = None
    if value_model == "separate":
        config, base = copy.deepcopy(policy.lm.config), base_of(model_name)
        critic = AutoModel.from_pretrained(base, config=config, dtype=dtype)
        if lora is not None or base != model_name:
            mirror(critic, policy.lm)
    for model in (policy.lm, critic) if gradient_checkpointing else ():
        if model is not None:
            # Recomputed in the attention of the first time: see `algorithms.forward.same_attention_kernel`.
            contexts = {"context_fn": lambda: (contextlib.nullcontext(), policy.attention())}
            model.activation_checkpointing_enable({"use_reentrant": False, **contexts})
    return ActorCritic(policy, critic, values=value_model != "none").eval()


def parameter_groups(
    model: ActorCritic, *, learning_rate: float, critic_learning_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Optimizer groups: {policy, critic} × {decayed, not decayed}. Biases and norm weights (fewer than two axes) are
    not decayed. Each group has "base_lr", which the schedule multiplies, and a "name"."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name.startswith("policy."), parameter.ndim > 1), []).append(parameter)
    return [
        {
            "name": f"{'policy' if is_policy else 'critic'}{'' if decayed else '_no_decay'}",
            "params": parameters,
            "lr": learning_rate if is_policy else critic_learning_rate,
            "base_lr": learning_rate if is_policy else critic_learning_rate,
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for (is_policy, decayed), parameters in sorted(groups.items(), reverse=True)
    ]
