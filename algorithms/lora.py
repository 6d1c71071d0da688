"""Low-rank adapters (LoRA, Hu et al. 2021: W + alpha/r · B·A, with B = 0 at the start) in a transformers model.

peft's layers are put into the model in place, so that all who run it need not know of them. The base below them is
frozen. One adapter is trained; others are frozen copies of it, each of which can take its place for a while.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.functional import cast_adapter_dtype
from peft.tuners.lora import LoraLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

TRAINED = "default"  # the name that peft gives to an only adapter


class LoraSpec(Protocol):
    """r: rank. alpha: scale, of which alpha / r is applied. target_modules: the layers that get an adapter, by the ends
    of their names; "all-linear": all but the head; None: what peft has for the family. There is no dropout."""

    @property
    def r(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def target_modules(self) -> Any: ...


def lora_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """The layers that have adapters, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def target_names(lm: PreTrainedModel, wanted: Any) -> list[str]:
    """Full names of the layers that `wanted` means (see `LoraSpec`). Raises ValueError for words that mean none."""
    head, key = lm.get_output_embeddings(), "lora.target_modules"
    names = [name for name, m in lm.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    choice = f'"all-linear" or a list of these: {", ".join(sorted({name.rpartition(".")[2] for name in names}))}'
    if wanted == "all-linear":
        return names
    family = lm.config.model_type
    if wanted is None and (wanted := DEFAULT_TARGETS.get(family)) is None:
        raise ValueError(f"{key}: peft has no default for models of type {family}; set it to {choice}")
    if isinstance(wanted, str):
        found = {wanted: {name for name in names if re.fullmatch(wanted, name)}}
    else:
        found = {word: {name for name in names if f".{name}".endswith(f".{word}")} for word in wanted}
    if not found:
        raise ValueError(f"{key}: the list is empty; set it to {choice}")
    if missing := [word for word, matches in found.items() if not matches]:
        raise ValueError(f"{key}: no layer of {family} has the name {', '.join(missing)}; set it to {choice}")
    return [name for name in names if any(name in matches for matches in found.values())]


def inject(model: PreTrainedModel, config: LoraConfig, adapter: str) -> None:
    """Gives the layers of `config.target_modules` an adapter of this name with fresh weights; TRAINED is active."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # several are meant
        inject_adapter_in_model(config, model, adapter)
    cast_adapter_dtype(model, adapter)  # to float32: small steps get lost in bfloat16
    model.train(model.training)  # the new layers too
    activate(model, TRAINED)


def trained_config(lm: PreTrainedModel) -> LoraConfig:
    """A copy of the trained adapter's configuration."""
    config: Any = copy.copy(lm.peft_config[TRAINED])
    assert isinstance(config, LoraConfig)
    return config


def adapter_weights(model: nn.Module, adapter: str = TRAINED) -> dict[str, nn.Parameter]:
    """The matrices A and B of an adapter, by the name of the parameter without that of the adapter."""
    name_of_it = re.compile(rf"(?<=\.lora_[AB])\.{adapter}(?=\.weight$)")
    found = {name: weight for name, weight in model.named_parameters() if name_of_it.search(name)}
    return {name_of_it.sub("", name): weight for name, weight in found.items()}


Put = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
"""put(targets, state): copies whole tensors into those of the same names, also where those are in parts."""


@torch.no_grad()
def put_whole(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copies tensors into those of the same names."""
    for name, target in targets.items():
        target.copy_(state[name])


def copy_into(targets: Mapping[str, Tensor], state: Mapping[str, Tensor], fault: str, put: Put = put_whole) -> None:
    """Copies tensors of the same names and shapes. Raises ValueError that begins with `fault` if they are not."""
    shapes = {name: getattr(target, "ds_shape", target.shape) for name, target in targets.items()}  # DeepSpeed's parts
    named = [
        ("missing", sorted(targets.keys() - state.keys())),
        ("unknown", sorted(state.keys() - targets.keys())),
        ("of another shape", [n for n in targets if n in state and shapes[n] != state[n].shape]),
    ]
    if problems := [f"{len(names)} {kind}, as {names[0]}" for kind, names in named if names]:
        raise ValueError(f"{fault}: {'; '.join(problems)}")
    put(targets, state)


def merged_state(lm: PreTrainedModel, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of the model without adapters that computes the same, added in float32. state: that of `lm`."""
    merged = dict(lm.state_dict() if state is None else state)
    for name, layer in lora_layers(lm).items():
        a, b = (merged[f"{name}.lora_{part}.{TRAINED}.weight"].float() for part in "AB")
        base, delta = merged[f"{name}.base_layer.weight"], b @ a * layer.scaling[TRAINED]
        turned = delta.T if isinstance(layer.get_base_layer(), Conv1D) else delta
        merged[f"{name}.base_layer.weight"] = (base.float() + turned).to(base.dtype)
    return {name.replace(".base_layer.", "."): value for name, value in merged.items() if ".lora_" not in name}


def merge(lm: PreTrainedModel) -> None:
    """Adds the trained adapter to the base, all of which is trained from here on; no adapter is left."""
    state = merged_state(lm)
    for name, layer in lora_layers(lm).items():
        lm.set_submodule(name, layer.get_base_layer())
    lm.load_state_dict(state)
    del lm.peft_config
    lm.requires_grad_(True)


def mirror(critic: PreTrainedModel, lm: PreTrainedModel) -> None:
    """Makes a critic's trunk begin as the policy: the same base, and an adapter of its own with the same weights."""

    def on_trunk(name: str) -> str:
        return name.removeprefix(f"{lm.base_model_prefix}.")

    if names := {on_trunk(name) for name in lora_layers(lm)}:
        config = trained_config(lm)
        config.target_modules = sorted(names)
        inject(critic, config, TRAINED)
    state = {on_trunk(name): value for name, value in lm.state_dict().items()}
    critic.load_state_dict({name: state[name] for name in critic.state_dict()})


def freeze_copy(lm: PreTrainedModel, adapter: str) -> None:
    """Adds a frozen copy of the trained adapter, under a name of its own, for `using`."""
    inject(lm, trained_config(lm), adapter)
    copy_into(adapter_weights(lm, adapter), adapter_weights(lm), "a copy of the adapter does not fit")


def activate(model: nn.Module, adapter: str | None) -> None:
    """Makes forwards use this adapter, the one then trained; None: no adapter, and none is trained."""
    for layer in lora_layers(model).values():
        layer.enable_adapters(adapter is not None)
        if adapter is not None:
            layer.set_adapter(adapter)


@contextmanager
def using(lm: nn.Module, adapter: str | None) -> Iterator[None]:
    """Another adapter in place of the trained one in the context; None: the bare base."""
    # peft trains the adapter that is active and no other: what was trained before is so again afterwards.
    flags = [(weight, weight.requires_grad) for weight in lm.parameters()]
    try:
        activate(lm, adapter)
        yield
    finally:
        activate(lm, TRAINED)
        for weight, flag in flags:
            weight.requires_grad_(flag)
