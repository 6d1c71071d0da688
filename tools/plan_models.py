"""A run's models with all their shapes and no numbers, made by the run's own functions out of config.json alone."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel

from algorithms import adapters
from algorithms.forward import Head
from algorithms.models import load_config
from algorithms.policy import LanguageModel
from tools.plan_memory import Ledger
from train.config import Config, RLAlg
from train.loading import check_model_name
from train.models import Models, load_models

# With these the logits are more than a product of states and head: the whole forward runs (see LanguageModel).
_CAPPED = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def model_name(config: Config) -> str:
    """Of the model to train."""
    return config.alg.policy.args.model_name if isinstance(config.alg, RLAlg) else config.alg.model_name


def architecture(config: Config) -> PretrainedConfig:
    """The model's config.json. Raises ValueError if there is none, or if it is of a model of the other kind."""
    name = model_name(config)
    check_model_name(name, ("config.json", adapters.CONFIG_FILE))
    check_model_name(adapters.base_of(name))
    seq2seq = config.alg.policy.is_seq2seq if isinstance(config.alg, RLAlg) else config.alg.model_type == "seq2seq"
    return load_config(name, seq2seq=seq2seq)


def sliced(config: PretrainedConfig, n: int) -> PretrainedConfig:
    """Of the part of a model that one of n tensor parallel processes computes: its heads, its columns of each MLP."""
    part = copy.deepcopy(config)
    text = part.get_text_config(decoder=True)
    heads = text.num_attention_heads
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = heads // n
    for name in ("num_key_value_heads", "intermediate_size"):
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name) // n)
    return part


@contextlib.contextmanager
def _empty_weights(parts: int) -> Iterator[None]:
    """Loading makes models of the right shapes and opens no weights; what needs numbers to be found out is assumed."""

    def config_of(name: str, *, seq2seq: bool) -> PretrainedConfig:
        found = load_config(name, seq2seq=seq2seq)
        return sliced(found, parts) if parts > 1 else found

    def pretrained(name: str, config: Any, *, dtype: Any = torch.float32, lora: Any = None) -> PreTrainedModel:
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        lm: PreTrainedModel = kind.from_config(config, dtype=dtype).eval()
        adapters.attach(lm, name, lora)
        return lm

    def trunk(_: str, config: Any, dtype: Any) -> nn.Module:
        made: nn.Module = AutoModel.from_config(config, dtype=dtype).eval()
        return made

    with (
        mock.patch("algorithms.models.load_config", config_of),
        mock.patch("algorithms.models.load_pretrained", pretrained),
        mock.patch.object(AutoModel, "from_pretrained", trunk),
        mock.patch("algorithms.policy.find_head", _head),
        mock.patch("algorithms.policy.check_causal", lambda lm: None),
    ):
        yield


def _head(lm: PreTrainedModel) -> Head | None:
    text = lm.config.get_text_config(decoder=True)
    capped = any(getattr(text, name, None) not in (None, 1, 1.0) for name in _CAPPED)
    bias = "final_logits_bias" if hasattr(lm, "final_logits_bias") else None
    return None if capped else Head(bias=bias)


def make_models(config: Config, parts: int = 1) -> Models:
    """All models of a run, as `train.models.load_models` gives them, on the meta device.

    parts: of tensor parallel ones, what one of so many processes computes with.
    """
    with _empty_weights(parts), torch.device("meta"), Ledger():
        if isinstance(config.alg, RLAlg):
            return load_models(config, None)  # type: ignore[arg-type]
        return Models(actor_critic=_supervised(config))  # type: ignore[arg-type]


def to_fake(models: Models) -> None:
    """Puts the models' tensors on the CPU, in the fake mode that is in force: there code runs as on real ones."""
    made: dict[int, Tensor] = {}

    def fake(x: Tensor) -> Tensor:
        if id(x) not in made:
            new = torch.empty(x.shape, dtype=x.dtype, device="cpu")
            made[id(x)] = nn.Parameter(new, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else new
        return made[id(x)]

    kept = []  # as long as numbers of objects are looked up
    for module in (models.actor_critic, *models.frozen.values()):
        for part in module.modules():
            for table in (part._parameters, part._buffers, vars(part)):
                for name, x in [(name, x) for name, x in table.items() if isinstance(x, Tensor)]:
                    kept.append(x)
                    table[name] = fake(x)


def _supervised(config: Config) -> nn.Module:
    """A module with the one model of supervised training, where others have policy and critic."""
    from algorithms.models import load_pretrained

    lm = load_pretrained(config.alg.model_name, architecture(config), lora=config.alg.lora)
    module = nn.Module()
    module.policy = LanguageModel(lm)
    module.critic = module.value_head = None
    return module


def bytes_of(module: nn.Module | None, *, trained: bool | None = None) -> int:
    """Of parameters and buffers, shared ones once; trained: of those parameters alone that are, or are not."""
    if module is None:
        return 0
    found = {id(p): p for p in module.parameters() if trained is None or p.requires_grad == trained}
    if trained is None:
        found |= {id(x): x for x in module.buffers()}
    return sum(x.nbytes for x in found.values())


def count(module: nn.Module | None, *, trained: bool | None = None) -> int:
    """Parameters, shared ones once; trained: those alone that are, or are not."""
    if module is None:
        return 0
    return sum(p.numel() for p in module.parameters() if trained is None or p.requires_grad == trained)
