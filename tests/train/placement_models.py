"""Tiny models of several families with value heads that say something, and maps that spread them over two GPUs."""

import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel

sys.path.append(str(Path(__file__).parents[1] / "algorithms"))
from tiny_adapters import lora, shake
from tiny_models import make_lm
from tiny_seq2seq import make_seq2seq

from algorithms import adapters
from algorithms.policy import ActorCritic, LanguageModel
from train.device_maps import DeviceMap, plan

_LLAMA = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 0}
_T5 = {"shared": 0, "lm_head": 0, "encoder.embed_tokens": 0, "encoder.block.0": 0, "encoder.block.1": 1}
MAPS: dict[str, dict[str, int]] = {
    "gpt2": {"transformer": 0, "transformer.h.1": 1, "transformer.ln_f": 1, "lm_head": 0},
    "llama": {**_LLAMA, "model.embed_tokens": 1, "lm_head": 1},  # the first weight is not on the first GPU
    "gemma2": _LLAMA,  # its logits come from its own forward
    "t5": {**_T5, "encoder.final_layer_norm": 1, "decoder": 1, "decoder.embed_tokens": 0, "decoder.block.0": 0},
    "bart": {"model": 0, "model.encoder.layers.1": 1, "model.decoder.layers.1": 1, "lm_head": 0},
}
FAMILIES = list(MAPS)


def actor_critic(family: str, value_model: str = "separate", adapter: bool = False) -> ActorCritic:
    """Policy and critic of two layers, with a value head that says something."""
    make = make_seq2seq if family in ("t5", "bart") else make_lm
    lm = make(family)
    if adapter:
        adapters.attach(lm, "nothing", lora(target_modules="all-linear"))
        shake(lm)
    critic = AutoModel.from_config(lm.config).eval() if value_model == "separate" else None
    model = ActorCritic(LanguageModel(lm), critic)
    nn.init.normal_(model.value_head.weight, std=0.3)
    return model.eval()


def maps_of(model: ActorCritic, given: dict[str, int] | None = None) -> dict[str, DeviceMap]:
    """Of policy and critic, written by hand."""
    others = {} if model.critic is None else {"critic": model.critic}
    return plan(given or MAPS[model.policy.lm.config.model_type], model.policy.lm, others, [0, 0])


def parts(model: ActorCritic) -> dict[str, Any]:
    return {"policy": model.policy.lm} | ({} if model.critic is None else {"critic": model.critic})


def loss_of(model: ActorCritic, inputs: dict[str, Any]) -> Tensor:
    scores = model(**inputs, unrestricted=True)
    return scores.logprobs.sum() + scores.raw_logprobs.sum() + scores.entropy.sum() + scores.values.square().sum()
