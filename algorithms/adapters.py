"""Policies with a low-rank adapter: loaded from folders and saved, their reference, and what a checkpoint holds.

The reference is the policy's own base with the adapter as it was at iteration 0: none if that began fresh, a frozen
copy if training goes on with the adapter of a folder. Loading the same `model_name` again gives the same reference.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, TaskType
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from algorithms.lora import (
    TRAINED,
    LoraSpec,
    Put,
    adapter_weights,
    copy_into,
    freeze_copy,
    inject,
    lora_layers,
    merge,
    merged_state,
    put_whole,
    target_names,
    trained_config,
    using,
)
from algorithms.policy import LanguageModel, Scores

REFERENCE = "reference"
CONFIG_FILE, WEIGHTS_FILE, FILE_PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# What a folder's adapter may say. All else changes more than W + B·A, or the base, or is not checked here.
# fmt: off
_PLAIN = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core", "runtime_config",
}
# fmt: on


def folder_config(model_name: str) -> LoraConfig | None:
    """The configuration of the adapter in a folder, None if `model_name` is no such folder.

    Raises ValueError for an adapter of another kind than LoRA, or with additions to it.
    """
    folder = Path(model_name).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        return None
    try:
        config, plain = PeftConfig.from_pretrained(str(folder)), LoraConfig()
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / CONFIG_FILE} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{model_name} is an adapter of type {config.peft_type.value}; only LoRA is available")
    names = [field.name for field in fields(config) if field.name not in _PLAIN]
    if config.init_lora_weights in (False, "gaussian"):  # before training; nothing is left of it
        names.remove("init_lora_weights")
    if more := [name for name in names if getattr(config, name, None) != getattr(plain, name, None)]:
        raise ValueError(f"{model_name} is an adapter with {', '.join(more)}, not available here: merge it with peft")
    config.lora_dropout, config.init_lora_weights, config.inference_mode = 0.0, True, False
    return config


def base_of(model_name: str) -> str:
    """The model that the adapter in a folder belongs to; any other `model_name` is its own base."""
    config = folder_config(model_name)
    if config is None:
        return model_name
    base, cure = config.base_model_name_or_path, f"correct base_model_name_or_path in {Path(model_name) / CONFIG_FILE}"
    if not base:
        raise ValueError(f"the adapter {model_name} does not say which model it belongs to: {cure}")
    if (base[0] in "/.~" or base.count("/") > 1) and not Path(base).expanduser().is_dir():
        raise ValueError(f"{model_name} is an adapter of {base}, and there is no such folder: {cure}")
    return base


def attach(lm: PreTrainedModel, model_name: str, lora: LoraSpec | None) -> None:
    """Gives a base that was just loaded the adapter of `model_name`, or a fresh one.

    lora: the adapter is trained and the base frozen; None: the folder's adapter is merged into the base, all of which
    is trained. A fresh one depends on `torch.manual_seed`. Raises ValueError if `lora` does not fit model or folder.
    """
    config = folder_config(model_name)
    names = (
        set(target_names(lm, lora.target_modules))
        if lora and (config is None or lora.target_modules is not None)
        else None
    )
    if config is not None:
        try:
            inject(lm, config, TRAINED)
        except ValueError as error:
            base = config.base_model_name_or_path
            raise ValueError(f"the adapter {model_name} does not fit its base {base}: {error}") from error
        load_weights(lm, model_name)
        if lora is None:
            merge(lm)
            return
        _check_agreement(lm, model_name, lora, names)
        freeze_copy(lm, REFERENCE)
    elif lora is not None and names is not None:
        inject(lm, _fresh_config(lm, model_name, lora, names), TRAINED)


def _fresh_config(lm: PreTrainedModel, model_name: str, lora: LoraSpec, names: set[str]) -> LoraConfig:
    ends = {name.rpartition(".")[2] for name in names}
    matched = {name for name, _ in lm.named_modules() if name.rpartition(".")[2] in ends}
    is_folder = Path(model_name).expanduser().is_dir()
    return LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,  # type: ignore[arg-type]
        target_modules=sorted(ends if matched == names else names),
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in lm.modules()),
        task_type=TaskType.SEQ_2_SEQ_LM if lm.config.is_encoder_decoder else TaskType.CAUSAL_LM,
        base_model_name_or_path=str(Path(model_name).expanduser().resolve()) if is_folder else model_name,
    )


def load_weights(lm: PreTrainedModel, model_name: str) -> None:
    """Puts the weights of a folder's adapter into the trained one. Raises ValueError for a folder that does not fit."""
    path = Path(model_name).expanduser() / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{model_name} is an adapter without {WEIGHTS_FILE}")
    targets = {FILE_PREFIX + name: weight for name, weight in adapter_weights(lm).items()}
    try:
        weights = load_file(str(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    copy_into(targets, weights, f"the adapter {model_name} does not fit its base")
    if isinstance(lm.get_output_embeddings(), LoraLayer):
        raise ValueError(f"{model_name} is an adapter with a part for the head, not available here: merge it with peft")


def _check_agreement(lm: PreTrainedModel, model_name: str, lora: LoraSpec, names: set[str] | None) -> None:
    config = trained_config(lm)
    for key, given, there in (("r", lora.r, config.r), ("alpha", lora.alpha, config.lora_alpha)):
        if given != there:
            raise ValueError(f"lora.{key} is {given}, but {model_name} is an adapter with {there}: set it to {there}")
    if names is not None and names != lora_layers(lm).keys():
        raise ValueError(f"lora.target_modules are not those of the adapter {model_name}: leave them out")


def reference_of(policy: LanguageModel) -> Callable[..., Scores]:
    """The reference that shares the policy's base; called as `LanguageModel.forward`, without gradients."""
    if not lora_layers(policy):
        raise ValueError("the policy has no adapter: load its reference with load_reference")
    adapter = REFERENCE if REFERENCE in policy.lm.peft_config else None

    @torch.no_grad()
    def reference(*args: Any, **kwargs: Any) -> Scores:
        with using(policy.lm, adapter):
            scores: Scores = policy(*args, **kwargs)
        return scores

    return reference


def save_pretrained(
    policy: LanguageModel, folder: str | os.PathLike[str], state: Mapping[str, Tensor] | None = None
) -> None:
    """Writes the trained adapter as peft does, or, of a policy that has none, the model.

    state: the state dict of policy.lm, where it is in parts that this process does not have.
    """
    if not lora_layers(policy):
        policy.save_pretrained(folder, state)
        return
    own = policy.lm.state_dict() if state is None else state
    names = {name: f"{name.removesuffix('.weight')}.{TRAINED}.weight" for name in adapter_weights(policy.lm)}
    weights = {FILE_PREFIX + name: own[inner].detach().cpu().contiguous() for name, inner in names.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(weights, str(Path(folder) / WEIGHTS_FILE), metadata={"format": "pt"})
    config = trained_config(policy.lm)
    config.inference_mode = True
    if not isinstance(config.target_modules, str):
        # In an order: that of a set differs from one process to the next.
        config.target_modules = sorted(config.target_modules or [])
    config.save_pretrained(str(folder))


def save_merged(
    policy: LanguageModel, folder: str | os.PathLike[str], state: Mapping[str, Tensor] | None = None
) -> None:
    """Writes the whole model with the adapter merged in, for `from_pretrained`; nothing in memory changes."""
    lm = policy.lm
    ours, lm.config = lm.config, policy.original_config
    try:
        lm.save_pretrained(folder, state_dict=merged_state(lm, state))
    finally:
        lm.config = ours


Whole = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""whole(named): the whole tensors of weights and buffers, also of those that are in parts."""


def plain(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are whole already, without their gradients."""
    return {name: value.detach().contiguous() for name, value in named.items()}


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has to hold, by name: weights that share memory once, and buffers."""
    weights = dict(model.named_parameters())
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    adapters = {name: weight for name, weight in weights.items() if f".{TRAINED}.weight" in name}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in every}
    return {**(trained or adapters or weights), **buffers}


def trainable_state(model: nn.Module, whole: Whole = plain) -> dict[str, Tensor]:
    """The weights that training changes, and buffers. Of a model with none to train (NLPO's mask policy, which follows
    the policy) the adapter, or everything if it has no adapter."""
    return whole(_changing(model))


def lm_state(policy: LanguageModel, whole: Whole = plain) -> dict[str, Tensor]:
    """The state dict of policy.lm, for `save_pretrained` and `save_merged`: weights that it holds twice stay one."""
    named = policy.lm.state_dict(keep_vars=True)
    first = {id(value): name for name, value in reversed(named.items())}
    state = whole({name: value for name, value in named.items() if first[id(value)] == name})
    return {name: state[first[id(value)]] for name, value in named.items()} if state else {}


def load_trainable_state(model: nn.Module, state: Mapping[str, Tensor], put: Put = put_whole) -> None:
    """Puts a `trainable_state` back. Raises ValueError, with nothing changed, if it is not one of such a model."""
    copy_into(_changing(model), state, f"the weights do not fit {type(model).__name__}", put)
