"""A tokenizer with ten words, a few samples, and the environment's settings for them."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from envs.samples import Sample

WORDS = ["<pad>", "</s>", "<unk>", "<start>", *"abcdefghij"]
PAD, EOS, UNK, START = range(4)
ENV: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "eos_token_ids": [EOS],
    "pad_token_id": PAD,
    "max_prompt_length": 4,
    "max_episode_length": 6,
    "terminate_on_eos": True,
}


def make_tokenizer(with_eos: bool = False) -> Tokenizer:
    """One token per word; with_eos: prompts end with end-of-sequence, as T5's do."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:4])
    if with_eos:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return tokenizer


SAMPLES = [
    Sample(f"s{i}", prompt, [f"reference {i}"], {"number": i})
    for i, prompt in enumerate(["a b", "c", "a b c d e f", "j i h g", "b a b", "a ü </s> \U0001f600 c", "d d d d d"])
]
