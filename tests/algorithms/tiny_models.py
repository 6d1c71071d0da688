"""Random models of several families, a few thousand weights each, sharp enough that tokens differ in probability."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

VOCAB = 37  # not a multiple of 8
EOS, PAD = 3, 0

_ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "gpt2": (GPT2Config, {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": (LlamaConfig, {**_ROTARY, "attention_dropout": 0.1}),
    "qwen2": (Qwen2Config, {**_ROTARY, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {**_ROTARY, "sliding_window": 5}),
    "gemma2": (Gemma2Config, {**_ROTARY, "head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 2.0}),
    "bloom": (BloomConfig, {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": (OPTConfig, {**_ROTARY, "ffn_dim": 48, "word_embed_proj_dim": 32}),
}
FAMILIES = list(CONFIGS)


def make_lm(family: str, *, seed: int = 0, scale: float = 6.0, **changes: Any) -> PreTrainedModel:
    """A causal language model in eval mode; `scale` multiplies the matrices that transformers initialised."""
    config_class, args = CONFIGS[family]
    torch.manual_seed(seed)
    special = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(config_class(**{**args, **special, **changes}))
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return lm.eval()


def make_prompts(
    lengths: list[int], *, width: int | None = None, seed: int = 1, pad: int = PAD
) -> tuple[Tensor, Tensor]:
    """Left-padded random prompts and their mask, int64 [B, width]."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids, mask = torch.full((len(lengths), width), pad), torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(4, VOCAB, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


@functools.cache
def shared_lm(family: str) -> PreTrainedModel:
    """`make_lm(family)`, made once: not to be changed."""
    return make_lm(family)


def first_layer(lm: nn.Module) -> nn.Module:
    """The first block: it runs once per forward."""
    layers: nn.ModuleList = next(m for m in lm.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    return layers[0]


@contextlib.contextmanager
def counting_calls(module: nn.Module) -> Iterator[list[torch.Size]]:
    """Shapes of the first positional input of every call of `module` in the context."""
    shapes: list[torch.Size] = []
    hook = module.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    try:
        yield shapes
    finally:
        hook.remove()


def naive_logits(lm: PreTrainedModel, ids: list[int]) -> Tensor:
    """float32 [L, V]: one sequence, no padding, no cache, no position ids."""
    with torch.no_grad():
        logits: Tensor = lm(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """bool [B, width], True at the first `lengths` positions."""
    return torch.arange(width) < lengths[:, None]
