"""Make a small, randomly initialised language model and its tokenizer: something to train where no hub can be reached.

    python -m tools.make_tiny_model --out runs/models/numbers --family gpt2 --tokenizer numbers
    python -m tools.make_tiny_model --out runs/models/dates --family llama --tokenizer char --alphabet "0123456789- "
    python -m tools.make_tiny_model --out runs/models/words --family t5 --tokenizer word --text texts.txt

The folder is a `model_name` for every script: `from_pretrained` loads the model and the tokenizer from it. Families t5,
bart and blenderbot are sequence-to-sequence; their tokenizers end each text with EOS, as those of the real ones do.

Tokenizers, all with distinct tokens for padding, end of text and unknown:
  numbers  one token per whole number 0 … max_number; texts are numbers separated by spaces
  char     one token per character of the alphabet (digits, dash and space by default, so that dates can be written)
  byte     one token per byte: any text
  word     the most frequent words of a text or jsonl file
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SEQ2SEQ_FAMILIES = ("t5", "bart", "blenderbot")
FAMILIES = ("gpt2", "llama", "qwen2", *SEQ2SEQ_FAMILIES)
PAD, EOS, UNK = SPECIAL_TOKENS = ("<pad>", "<|endoftext|>", "<unk>")
WORD = r"[a-z]+(?:'[a-z]+)*|[0-9]+|[.,!?;:]"
"""What the word-level tokenizer calls a word: letters with inner apostrophes, digits, or one punctuation mark."""


def _vocabulary(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate([*SPECIAL_TOKENS, *dict.fromkeys(tokens)])}


def numbers_tokenizer(max_number: int = 99) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(_vocabulary(map(str, range(max_number + 1))), unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def char_tokenizer(alphabet: str = "0123456789- ") -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(_vocabulary(alphabet), unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(_vocabulary(sorted(pre_tokenizers.ByteLevel.alphabet())), [], unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_tokenizer(words: Iterable[str]) -> Tokenizer:
    """Lower-cased words and punctuation; decoding puts no space before punctuation."""
    tokenizer = Tokenizer(models.WordLevel(_vocabulary(words), unk_token=UNK))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


def frequent_words(path: Path, size: int) -> list[str]:
    """The `size` most frequent words of a text file, or of the prompts and references of a jsonl file."""
    import re

    counts: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line
        if path.suffix == ".jsonl" and line.strip():
            row = json.loads(line)
            text = " ".join([row.get("prompt", ""), row.get("reference", ""), *row.get("references", [])])
        counts.update(re.findall(WORD, text.lower()))
    if not counts:
        raise ValueError(f"{path} has no words")
    return [word for word, _ in counts.most_common(size)]


def wrap(tokenizer: Tokenizer, max_length: int, family: str = "gpt2") -> PreTrainedTokenizerFast:
    """As a transformers tokenizer whose special tokens are known, and which ends texts as the family's does."""
    from transformers import PreTrainedTokenizerFast

    if family in SEQ2SEQ_FAMILIES:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["$A", EOS], pair=["$A", EOS, "$B:1", f"{EOS}:1"], special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    family: str, tokenizer: PreTrainedTokenizerFast, *, layers: int, hidden: int, heads: int, positions: int, seed: int
) -> PreTrainedModel:
    """A randomly initialised model without dropout and with tied embeddings; the same seed gives the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)}")
    config = (seq2seq_config if family in SEQ2SEQ_FAMILIES else causal_config)(
        family, layers=layers, hidden=hidden, heads=heads, positions=positions, **_common(tokenizer)
    )
    torch.manual_seed(seed)
    auto = AutoModelForSeq2SeqLM if family in SEQ2SEQ_FAMILIES else AutoModelForCausalLM
    return auto.from_config(config)


def _common(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }


def causal_config(
    family: str, *, layers: int, hidden: int, heads: int, positions: int, **common: Any
) -> PreTrainedConfig:
    from transformers import GPT2Config, LlamaConfig, Qwen2Config

    if family == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": positions}
        return GPT2Config(**common, **shape, **no_dropout)
    return (LlamaConfig if family == "llama" else Qwen2Config)(
        **common,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        max_position_embeddings=positions,
    )


def seq2seq_config(
    family: str, *, layers: int, hidden: int, heads: int, positions: int, **common: Any
) -> PreTrainedConfig:
    """`layers` in the encoder and as many in the decoder. None forces a first or a last token."""
    from transformers import BartConfig, BlenderbotConfig, T5Config

    if family == "t5":
        shape = {"num_layers": layers, "d_model": hidden, "d_ff": 3 * hidden, "num_heads": heads}
        start = common["pad_token_id"]
        return T5Config(**common, **shape, d_kv=hidden // heads, dropout_rate=0.0, decoder_start_token_id=start)
    sides = {"layers": layers, "attention_heads": heads, "ffn_dim": 3 * hidden}
    return (BlenderbotConfig if family == "blenderbot" else BartConfig)(
        **common,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()},
        d_model=hidden,
        max_position_embeddings=positions,
        dropout=0.0,
        decoder_start_token_id=common["eos_token_id"],
        forced_bos_token_id=None,
        forced_eos_token_id=None,
    )


def save(out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m tools.make_tiny_model", description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True, help="folder to write; one that exists already is refused")
    p.add_argument("--overwrite", action="store_true", help="write into a folder that exists")
    p.add_argument("--family", choices=FAMILIES, default="gpt2")
    p.add_argument("--tokenizer", choices=("numbers", "char", "byte", "word"), default="numbers")
    p.add_argument("--max_number", type=int, default=99, help="numbers: the largest number (99)")
    p.add_argument("--alphabet", default="0123456789- ", help='char: the characters ("0123456789- ")')
    p.add_argument("--text", type=Path, help="word: text or jsonl file to take the words from")
    p.add_argument("--n_words", type=int, default=1500, help="word: how many words (1500)")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--hidden", type=int, default=64, help="width; a multiple of --heads")
    p.add_argument("--heads", type=int, default=4)
    p.add_argument(
        "--positions",
        type=int,
        default=128,
        help="tokens of the longest prompt and response (sequence-to-sequence: of either) (128)",
    )
    p.add_argument("--seed", type=int, default=0)
    return p


def make_tokenizer(args: argparse.Namespace) -> Tokenizer:
    if args.tokenizer == "numbers":
        return numbers_tokenizer(args.max_number)
    if args.tokenizer == "char":
        return char_tokenizer(args.alphabet)
    if args.tokenizer == "byte":
        return byte_tokenizer()
    if args.text is None:
        raise ValueError("--tokenizer word needs --text FILE")
    return word_tokenizer(frequent_words(args.text, args.n_words))


def main(argv: list[str] | None = None) -> None:
    p = parser()
    args = p.parse_args(argv)
    if args.out.exists() and not args.overwrite:
        p.error(f"{args.out} exists; give another --out, or --overwrite")
    if args.hidden % args.heads:
        p.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    try:
        tokenizer = wrap(make_tokenizer(args), args.positions, args.family)
    except (ValueError, OSError) as error:
        p.error(str(error))
    shape = {"layers": args.layers, "hidden": args.hidden, "heads": args.heads, "positions": args.positions}
    model = build_model(args.family, tokenizer, seed=args.seed, **shape)
    save(args.out, model, tokenizer)
    print(f"{args.out}: {args.family}, {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
