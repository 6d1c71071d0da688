"""Rows, labels and batches of supervised training: exactly which tokens are trained."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from envs.samples import Sample
from tools.make_tiny_model import byte_tokenizer, numbers_tokenizer, wrap
from train.supervised_data import IGNORED, Collator, RowBuilder, make_rows, token_losses

PAD, EOS = 0, 1
X = IGNORED


def builder(tokenizer: Any = None, **options: Any) -> RowBuilder:
    return RowBuilder(
        **{"tokenizer": tokenizer or wrap(numbers_tokenizer(20), 64), "vocab_size": 300, "max_length": 64, **options}
    )


def sample(prompt: str, *references: str) -> Sample:
    return Sample("s", prompt, list(references))


def n(*numbers: int) -> list[int]:
    """Token ids of numbers."""
    return [3 + number for number in numbers]


def test_only_the_reference_and_eos_are_trained() -> None:
    rows = builder()([sample("5 6", "7 8", "9")])
    assert rows == [
        {"input_ids": [*n(5, 6, 7, 8), EOS], "labels": [X, X, *n(7, 8), EOS]},
        {"input_ids": [*n(5, 6, 9), EOS], "labels": [X, X, *n(9), EOS]},
    ]


def test_loss_on_prompt_trains_all_but_the_first_token() -> None:
    rows = builder()([sample("5 6", "7")], loss_on_prompt=True)
    assert rows == [{"input_ids": [*n(5, 6, 7), EOS], "labels": [X, *n(6, 7), EOS]}]


def test_a_context_start_token_stands_between_prompt_and_reference() -> None:
    """As in rollouts; it takes one of the model's positions."""
    tokenizer = wrap(numbers_tokenizer(20), 64)
    tokenizer.truncation_side = "left"
    assert builder(tokenizer, context_start_token=2)([sample("5 6", "7")])[0]["input_ids"] == [*n(5, 6), 2, *n(7), EOS]
    for max_length, expected in ((4, [*n(6), 2, *n(7), EOS]), (3, [*n(6), 2, *n(7)])):
        row = builder(tokenizer, context_start_token=2, max_length=max_length)([sample("5 6", "7")])[0]
        assert row["input_ids"] == expected and row["labels"][:2] == [X, X] and row["labels"][2:] == expected[2:]


def test_rows_of_all_splits(capsys: pytest.CaptureFixture[str]) -> None:
    """Loss on the prompt is for training only; val and test may be limited."""
    given = {split: [sample("5 6", "7", "8"), sample("1", "2")] for split in ("train", "val", "test")}
    rows = make_rows(builder(), given, loss_on_prompt=True, max_eval_samples=1, say=True)
    assert [len(rows[split]) for split in given] == [3, 2, 2]
    assert rows["train"][0]["labels"] == [X, *n(6, 7), EOS] and rows["val"][0]["labels"] == [X, X, *n(7), EOS]
    assert capsys.readouterr().out.splitlines()[:2] == [
        "train: 3 references of 2 samples",
        "val: 2 references of 1 samples",
    ]


def test_an_empty_reference_trains_eos() -> None:
    assert builder()([sample("5", "")]) == [{"input_ids": [*n(5), EOS], "labels": [X, EOS]}]


def test_an_empty_prompt_begins_with_eos_as_in_rollouts() -> None:
    assert builder()([sample("", "7")]) == [{"input_ids": [EOS, *n(7), EOS], "labels": [X, *n(7), EOS]}]


def test_eos_at_the_end_of_a_reference_is_not_doubled() -> None:
    assert builder()([sample("5", "7 <|endoftext|>")])[0]["labels"] == [X, *n(7), EOS]


def test_long_prompts_are_cut_on_the_tokenizers_side() -> None:
    tokenizer = wrap(numbers_tokenizer(20), 64)
    for side, kept in (("left", (2, 3)), ("right", (1, 2))):
        tokenizer.truncation_side = side
        rows = builder(tokenizer, max_prompt_length=2)([sample("1 2 3", "7")])
        assert rows[0]["input_ids"] == [*n(*kept, 7), EOS]


def test_a_prompt_makes_room_for_its_reference() -> None:
    tokenizer = wrap(numbers_tokenizer(20), 64)
    tokenizer.truncation_side = "left"
    make = builder(tokenizer, max_length=5)
    assert make([sample("1 2 3", "7 8")])[0]["input_ids"] == [*n(2, 3, 7, 8), EOS]
    assert make.n_cut == 0


def test_a_reference_that_is_cut_does_not_teach_eos() -> None:
    tokenizer = wrap(numbers_tokenizer(20), 64)
    tokenizer.truncation_side = "left"
    make = builder(tokenizer, max_length=4)
    assert make([sample("1 2", "7 8 9")]) == [{"input_ids": n(2, 7, 8, 9), "labels": [X, *n(7, 8, 9)]}]
    assert make.n_cut == 1


@pytest.mark.parametrize(
    ("prompt", "reference", "separator", "text"),
    [
        ("ab", "cd", " ", "ab cd"),
        ("ab ", "cd", " ", "ab cd"),
        ("ab", " cd", " ", "ab cd"),
        ("ab\n", "cd", " ", "ab\ncd"),
        ("ab", "cd", "", "abcd"),
        ("ab", "cd", " -> ", "ab -> cd"),
        ("", "cd", " ", "<|endoftext|>cd"),
        ("ab", "", " ", "ab"),
        ("名", "前", "", "名前"),
    ],
)
def test_separator(prompt: str, reference: str, separator: str, text: str) -> None:
    tokenizer = wrap(byte_tokenizer(), 64)
    row = builder(tokenizer, separator=separator)([sample(prompt, reference)])[0]
    assert tokenizer.decode(row["input_ids"]) == text + "<|endoftext|>"


def test_the_prompts_tokens_are_those_of_the_prompt_alone() -> None:
    # Together "a" and "b" would be one token; in rollouts the prompt's last token is given.
    merged = Tokenizer(models.BPE({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4, "c": 5}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged, eos_token="<eos>", pad_token="<pad>")
    row = builder(tokenizer, separator="")([sample("ca", "bc")])[0]
    assert row == {"input_ids": [5, 2, 3, 5, 1], "labels": [X, X, 3, 5, 1]}


def test_word_boundary_marks_are_kept() -> None:
    # As in SentencePiece: the first word of a text gets a mark of its own, so a space before it would be one too many.
    vocabulary = {"<pad>": 0, "</s>": 1, "<s>": 2, "<unk>": 3, "▁a": 4, "▁b": 5, "▁": 6}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    plain.decoder = decoders.Metaspace(prepend_scheme="first")
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    row = builder(tokenizer)([sample("a", "b")])[0]
    assert row == {"input_ids": [2, 4, 5, 1], "labels": [X, X, 5, 1]}


def test_seq2seq_rows() -> None:
    plain = numbers_tokenizer(20)
    plain.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", EOS)]
    )
    make = builder(wrap(plain, 64), seq2seq=True, max_length=4)
    assert make([sample("5 6", "7 8")]) == [{"input_ids": [*n(5, 6), EOS], "labels": [*n(7, 8), EOS]}]
    assert make.n_cut == 0
    assert make([sample("5", "7 8 9 10")])[0]["labels"] == n(7, 8, 9, 10)
    assert make.n_cut == 1


def test_collator_masks_by_length_even_if_padding_is_eos() -> None:
    rows = builder()([sample("5 6", "7"), sample("5", "")])
    batch = Collator(pad=EOS)(rows)
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].tolist() == [[*n(5, 6, 7), EOS], [*n(5), EOS, EOS, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[X, X, *n(7), EOS], [X, EOS, X, X]]


def test_collator_shifts_the_decoders_inputs() -> None:
    rows = [{"input_ids": [9, 1], "labels": [7, 8, 1]}, {"input_ids": [9, 9, 1], "labels": [1]}]
    batch = Collator(pad=PAD, decoder_start=5)(rows)
    assert batch["input_ids"].tolist() == [[9, 1, PAD], [9, 9, 1]]
    assert batch["decoder_input_ids"].tolist() == [[5, 7, 8], [5, PAD, PAD]]
    assert batch["labels"].tolist() == [[7, 8, 1], [1, X, X]]


def test_token_losses() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]]))
    labels = torch.tensor([[X, 1, 0]])
    losses, mask = token_losses(logits, labels, seq2seq=False)
    assert torch.allclose(losses, -torch.log(torch.tensor([[0.5, 0.25]]))) and mask.tolist() == [[True, True]]
    losses, mask = token_losses(logits, labels, seq2seq=True)
    assert torch.allclose(losses, -torch.log(torch.tensor([[1.0, 0.75, 0.9]]))) and mask.tolist() == [
        [False, True, True]
    ]


def test_what_cannot_be_trained_is_named() -> None:
    with pytest.raises(ValueError, match="sample 's' has no references"):
        builder()([sample("5")])
    with pytest.raises(ValueError, match="sample 's': its reference has token 10.* only 8"):
        builder(vocab_size=8)([sample("1", "7")])
    with pytest.raises(ValueError, match="sample 's'.* prompt has token 10"):
        builder(vocab_size=8)([sample("7", "1")])
    with pytest.raises(ValueError, match="no EOS token"):
        builder(PreTrainedTokenizerFast(tokenizer_object=numbers_tokenizer(3)))
