"""Random encoder-decoders of several families, episodes for them, and scores by the plainest means."""

import functools
from typing import Any

import torch
from tiny_models import EOS, PAD, VOCAB, length_mask, make_prompts
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BlenderbotConfig,
    MBartConfig,
    MT5Config,
    PegasusConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5GemmaConfig,
)

from algorithms.forward import Head
from algorithms.models import without_dropout
from algorithms.packing import pack_mask
from algorithms.policy import ActorCritic, LanguageModel

T = 8
PROMPTS, RESPONSES = [6, 2, 4, 1], [T, 3, 1, 6]

_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": EOS,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}
_GEMMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "final_logit_softcapping": 2.0,
}
_CAPPED = {
    "encoder": _GEMMA,
    "decoder": {**_GEMMA, "cross_attention_hidden_size": 32},
    "decoder_start_token_id": 2,
    "is_encoder_decoder": True,
}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "t5": (T5Config, _T5),
    "t5_v1_1": (T5Config, {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": (MT5Config, {**_T5, "tie_word_embeddings": False}),
    "bart": (BartConfig, _BART),
    "mbart": (MBartConfig, {**_BART, "scale_embedding": True}),
    "pegasus": (PegasusConfig, _BART),
    "blenderbot": (BlenderbotConfig, _BART),
    "t5gemma": (T5GemmaConfig, _CAPPED),
}
HEADS = dict.fromkeys(CONFIGS, Head(bias="final_logits_bias")) | {
    "t5": Head(factor=32**-0.5),
    "t5_v1_1": Head(),
    "mt5": Head(),
    "t5gemma": None,
}
FAMILIES = list(CONFIGS)
FAST = [family for family in FAMILIES if HEADS[family] is not None]


def _sharpen(model: PreTrainedModel, family: str) -> None:
    """T5 begins with large weights, the others with small ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "t5" not in family:
                parameter.mul_(6)


def make_seq2seq(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """An encoder-decoder without dropout, in eval mode, that has biases and untied weights where its family may."""
    config_class, args = CONFIGS[family]
    torch.manual_seed(seed)
    special = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}
    config = without_dropout(config_class(**{**args, **special, **changes}))
    lm: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(config)
    if not args.get("tie_word_embeddings", True):
        lm.lm_head.weight = nn.Parameter(torch.randn_like(lm.lm_head.weight) / 4)
    if hasattr(lm, "final_logits_bias"):
        lm.final_logits_bias.normal_()
    _sharpen(lm, family)
    return lm.eval()


@functools.cache
def shared_seq2seq(family: str) -> PreTrainedModel:
    """`make_seq2seq(family)`, made once: not to be changed."""
    return make_seq2seq(family)


def actor_critic(family: str, *, shared: bool = False, dtype: torch.dtype = torch.float32) -> ActorCritic:
    """Policy and critic of one family, with a value head that says something."""
    lm, critic = make_seq2seq(family), None
    if not shared:
        torch.manual_seed(9)
        critic = AutoModel.from_config(lm.config)
        _sharpen(critic, family)
    model = ActorCritic(LanguageModel(lm.to(dtype)), None if critic is None else critic.to(dtype))
    nn.init.normal_(model.value_head.weight, std=0.3)
    return model.eval()


def first_block(stack: nn.Module) -> nn.Module:
    """The first layer of an encoder or decoder, which runs once per forward."""
    layers: nn.ModuleList = next(m for m in stack.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    return layers[0]


def episodes(*, restricted: bool = False, temperature: float = 1.0) -> dict[str, Any]:
    """Arguments of a forward: left-padded prompts, right-padded responses, one of them with a padding token inside."""
    prompt_ids, prompt_mask = make_prompts(PROMPTS, width=7)
    response_ids, _ = make_prompts([T] * len(PROMPTS), seed=7)
    response_ids[0, 2] = PAD
    mask = length_mask(torch.tensor(RESPONSES), T)
    allowed = torch.rand(len(PROMPTS), T, VOCAB, generator=torch.Generator().manual_seed(5)) < 0.4
    allowed.scatter_(2, response_ids[..., None], True)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "response_ids": torch.where(mask, response_ids, PAD),
        "response_mask": mask,
        "action_mask": pack_mask(allowed) if restricted else None,
        "temperature": temperature,
    }


def row_of(inputs: dict[str, Any], b: int) -> tuple[Tensor, Tensor]:
    """Prompt [L] and response [n] of one episode, without padding."""
    return (
        inputs["prompt_ids"][b][inputs["prompt_mask"][b].bool()],
        inputs["response_ids"][b][inputs["response_mask"][b]],
    )


def naive(lm: PreTrainedModel, prompt: Tensor, response: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """(logits [n+1, V], states [n+1, H]) of one episode by the model's own forward: no padding, no cache."""
    decoder_ids = torch.cat([torch.tensor([start]), response])[None]
    with torch.no_grad():
        out = lm(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            decoder_input_ids=decoder_ids,
            decoder_attention_mask=torch.ones_like(decoder_ids),
            use_cache=False,
            output_hidden_states=True,
        )
    return out.logits[0].float(), out.decoder_hidden_states[-1][0]
