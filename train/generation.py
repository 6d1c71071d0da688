"""Keywords for generation in evaluation: which our sampler takes, and which none may have."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from train.config_loader import accepts, unknown
from train.config_types import Count, Natural, Positive, Share, describe

OWN_KEYS = {"do_sample", "top_k", "top_p", "temperature", "min_new_tokens", "max_new_tokens"}
OWN_KEYS |= {"forced_bos_token_id", "forced_eos_token_id"}
KINDS: dict[str, Any] = {
    "do_sample": bool,
    "temperature": Positive,  # do_sample: false takes the likeliest tokens
    **dict.fromkeys(("top_k", "min_new_tokens", "no_repeat_ngram_size"), Natural),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), Natural),
    **dict.fromkeys(("max_new_tokens", "num_beams"), Count),
    "top_p": Share,
    "repetition_penalty": Positive,
}
# `generate` would take them, and give something else than one response per prompt that ends as the run's end.
DECIDED = ("max_length", "num_return_sequences", "return_dict_in_generate", "eos_token_id", "pad_token_id")
DECIDED += ("decoder_start_token_id",)


def check_generation_kwargs(
    kwargs: Mapping[str, Any], key: str = "train_evaluation.generation_kwargs", vocab_size: int | None = None
) -> None:
    """Raises ValueError for what transformers would ignore without a word, or sample nonsense with."""
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_") and name not in DECIDED]
    for name in kwargs:
        if name in DECIDED:
            raise ValueError(f"{key}.{name}: the run decides that; leave it out (lengths: max_new_tokens)")
        if name not in known:
            raise ValueError(f"{key}: {unknown('keyword', name, known)}")
    for name, kind in KINDS.items():
        if (value := kwargs.get(name)) is not None and not accepts(kind, value):
            raise ValueError(f"{key}.{name}: expected {describe(kind)}, got {value!r}")
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if vocab_size is not None and (token := kwargs.get(name)) is not None and token >= vocab_size:
            raise ValueError(f"{key}.{name} {token} is outside the model's vocabulary of {vocab_size}")
    fewest, most = kwargs.get("min_new_tokens") or 0, kwargs.get("max_new_tokens")
    if most is not None and fewest > most:
        raise ValueError(f"{key}: min_new_tokens ({fewest}) exceeds max_new_tokens ({most})")
