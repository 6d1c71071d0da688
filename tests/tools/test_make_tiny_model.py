"""Tiny models: what every script loads from the folder."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from tools.make_tiny_model import FAMILIES, SEQ2SEQ_FAMILIES, main


def make(out: Path, *args: str) -> Path:
    main(["--out", str(out), "--layers", "1", "--hidden", "16", "--heads", "2", *args])
    return out


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SEQ2SEQ_FAMILIES])
def test_causal_families(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path / "model", "--family", family)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == family
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    out = model(**tokenizer(["1 2", "3"], padding=True, return_tensors="pt"))
    assert out.logits.shape == (2, 2, len(tokenizer))


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
def test_sequence_to_sequence_families(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path / "model", "--family", family)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    config, pad, eos = model.config, tokenizer.pad_token_id, tokenizer.eos_token_id
    assert config.model_type == family and (config.pad_token_id, config.eos_token_id) == (pad, eos)
    assert config.decoder_start_token_id == (pad if family == "t5" else eos)
    assert getattr(config, "scale_decoder_outputs", True), "T5's way with tied embeddings"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(value for name, value in config.to_dict().items() if "drop" in name)
    forced = ("forced_bos_token_id", "forced_eos_token_id")
    assert not any(getattr(model.generation_config, name, None) is not None for name in forced)
    inputs = tokenizer(["1 2", "3"], padding=True, return_tensors="pt")
    out = model(**inputs, decoder_input_ids=torch.full((2, 5), config.decoder_start_token_id))
    assert inputs.input_ids.shape == (2, 3) and out.logits.shape == (2, 5, len(tokenizer))


@pytest.mark.parametrize("tokenizer_args", [["numbers"], ["char"], ["byte"], ["word"]], ids=lambda args: args[0])
@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
def test_tokenizers_of_sequence_to_sequence_families_end_texts_with_eos(
    tmp_path: Path, family: str, tokenizer_args: list[str]
) -> None:
    (tmp_path / "words.txt").write_text("1 2 3")
    words = ["--text", str(tmp_path / "words.txt")] if tokenizer_args == ["word"] else []
    folder = make(tmp_path / "model", "--family", family, "--tokenizer", *tokenizer_args, *words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bare, eos = tokenizer("1 2", add_special_tokens=False).input_ids, tokenizer.eos_token_id
    assert eos not in bare and tokenizer("1 2").input_ids == [*bare, eos]
    assert tokenizer("1 2", "3").input_ids == [*bare, eos, *tokenizer("3").input_ids]
    assert tokenizer.decode([*bare, eos], skip_special_tokens=True) == "1 2"
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("1 2").ids == [*bare, eos]


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    folders = [make(tmp_path / str(i), "--seed", seed) for i, seed in enumerate("112")]
    first, same, other = (AutoModelForCausalLM.from_pretrained(folder).transformer.wte.weight for folder in folders)
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.parametrize(
    ("args", "text", "tokens", "back"),
    [
        (["numbers", "--max_number", "12"], "12 0 7", ["12", "0", "7"], None),
        (["numbers", "--max_number", "12"], "13 - 2<|endoftext|>", ["<unk>", "<unk>", "2", "<|endoftext|>"], "2"),
        (["char"], "2020-12-31 7", [*"2020-12-31 7"], None),
        (["char", "--alphabet", "ab\n"], "a\nbc", ["a", "\n", "b", "<unk>"], "a\nb"),
        (["byte"], "1-é\n", ["1", "-", "Ã", "©", "Ċ"], None),
    ],
)
def test_tokenizers(tmp_path: Path, args: list[str], text: str, tokens: list[str], back: str | None) -> None:
    folder = make(tmp_path / "model", "--tokenizer", *args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    # Workers decode with the tokenizer's file alone.
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert plain.encode(text).ids == ids
    assert plain.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == (text if back is None else back)


def test_word_tokenizer_takes_the_most_frequent_words(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "It\'s a film.", "references": ["A film, a FILM!"]}\n\n')
    folder = make(tmp_path / "model", "--tokenizer", "word", "--text", str(tmp_path / "texts.jsonl"), "--n_words", "3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert set(tokenizer.get_vocab()) == {"<pad>", "<|endoftext|>", "<unk>", "a", "film", "it's"}
    ids = tokenizer("It's – a film 7").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "it's a film"


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "model")
    (tmp_path / "empty.txt").write_text("")
    for args, message in (
        ([], "exists"),
        (["--overwrite", "--hidden", "15"], "not a multiple"),
        (["--overwrite", "--tokenizer", "word"], "needs --text"),
        (["--overwrite", "--tokenizer", "word", "--text", str(tmp_path / "empty.txt")], "has no words"),
        (["--overwrite", "--tokenizer", "word", "--text", str(tmp_path / "none.txt")], "No such file"),
    ):
        with pytest.raises(SystemExit):
            make(folder, *args)
        assert message in capsys.readouterr().err
