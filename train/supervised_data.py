"""Samples to token ids, labels and batches for supervised training, and the loss on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from envs.prompts import PromptEncoder
from envs.samples import Sample

IGNORED = -100
"""Label of a position without loss."""

Row = dict[str, list[int]]
"""input_ids and labels; of a causal model both have the same length, and a label is that of its own position."""


@dataclass(kw_only=True)
class RowBuilder:
    """Makes one row of each (prompt, reference) pair. The row's target ends with EOS, which is trained like a token.

    tokenizer: the model's (a fast one)
    seq2seq: the reference is the decoder's target; else it follows the prompt
    max_prompt_length: tokens of a prompt, or None for no other limit than max_length
    max_length: tokens of a row (of either side of a seq2seq row). A reference that does not fit is cut and then has no
        EOS, as it does not end there; a prompt makes room for the reference on its truncation_side
    context_start_token: put after every prompt of a causal model, as in rollouts; None = none
    separator: goes between prompt and reference unless one of them has white space there
    n_cut: references that were cut so far
    """

    tokenizer: Any
    vocab_size: int
    max_length: int
    seq2seq: bool = False
    max_prompt_length: int | None = None
    context_start_token: int | None = None
    separator: str = " "
    n_cut: int = 0

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token, which ends every reference")
        self._encode_prompt = PromptEncoder(
            tokenizer=self.tokenizer.backend_tokenizer,
            vocab_size=self.vocab_size,
            max_length=min(self.max_prompt_length or self.max_length, self.max_length),
            truncation_side=self.tokenizer.truncation_side,
            context_start_token=self.context_start_token,
            empty_prompt_token=self.empty_prompt_token,
        )

    @property
    def empty_prompt_token(self) -> int:
        """What stands for a prompt without tokens."""
        start = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if start is None else start)

    def __call__(self, samples: Iterable[Sample], *, loss_on_prompt: bool = False) -> list[Row]:
        """A row per reference, with labels on the reference or (causal) on the prompt as well.

        Raises ValueError for a sample without references, or with tokens that the model does not have.
        """
        rows = []
        for sample in samples:
            if not sample.references:
                raise ValueError(f"sample {sample.sample_id!r} has no references, so there is nothing to learn from it")
            rows += [self.row(sample, reference, loss_on_prompt) for reference in sample.references]
        return rows

    def row(self, sample: Sample, reference: str, loss_on_prompt: bool = False) -> Row:
        """Raises ValueError if a token is not in the model's vocabulary."""
        target = self.target(sample.prompt, reference)
        if max(target) >= self.vocab_size:
            raise ValueError(
                f"sample {sample.sample_id!r}: its reference has token {max(target)}, but the model's vocabulary has "
                f"only {self.vocab_size}: tokenizer and model do not belong together"
            )
        if self.seq2seq:
            return {"input_ids": self._encode_prompt(sample).ids, "labels": self._cut(target, self.max_length)}
        n_context = self.context_start_token is not None
        target = self._cut(target, self.max_length - n_context - 1)
        encoder, room = self._encode_prompt, self.max_length - n_context - len(target)
        if encoder.max_length > room:
            encoder = dataclasses.replace(encoder, max_length=room)
        prompt = encoder(sample).ids
        # Nothing predicts the first token.
        labels = [IGNORED, *prompt[1:]] if loss_on_prompt else [IGNORED] * len(prompt)
        return {"input_ids": prompt + target, "labels": labels + target}

    def target(self, prompt: str, reference: str) -> list[int]:
        """The tokens that should follow the prompt (of a causal model) or be decoded, with EOS at the end, uncut."""
        ids = self._encode(reference, True) if self.seq2seq else self._continuation(prompt, reference)
        eos = self.tokenizer.eos_token_id
        return ids if ids and ids[-1] == eos else [*ids, eos]

    def _continuation(self, prompt: str, reference: str) -> list[int]:
        """What follows the prompt's tokens when both are tokenized together, as some tokens begin with a space."""
        glued = not prompt or prompt[-1].isspace() or not reference or reference[0].isspace()
        rest = reference if glued else self.separator + reference
        head, whole = self._encode(prompt, False), self._encode(prompt + rest, False)
        # A token that spans the joint cannot be had in reinforcement learning, where the prompt's tokens are given.
        return whole[len(head) :] if whole[: len(head)] == head else self._encode(rest, False)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def _cut(self, target: list[int], room: int) -> list[int]:
        self.n_cut += len(target) > room
        return target[:room]


def make_rows(
    builder: RowBuilder,
    samples: Mapping[str, Sequence[Sample]],
    *,
    loss_on_prompt: bool = False,
    max_eval_samples: int | None = None,
    say: bool = False,
) -> dict[str, list[Row]]:
    """Rows of each split; of val and test at most max_eval_samples, and no loss on the prompt. Raises as RowBuilder."""
    rows = {}
    for split, given in samples.items():
        training = split == "train"
        n = len(given) if training else min(len(given), max_eval_samples or len(given))
        bar = tqdm(
            (given[i] for i in range(n)), f"tokenizing {split}", n, unit=" samples", disable=None if say else True
        )
        rows[split] = builder(bar, loss_on_prompt=loss_on_prompt and training)
        if say:
            print(f"{split}: {len(rows[split])} references of {n} samples")
    if say and builder.n_cut:
        print(f"{builder.n_cut} references are longer than {builder.max_length} tokens with their prompts and were cut")
    return rows


@dataclass(frozen=True)
class Collator:
    """Rows to a batch, padded on the right.

    Masks and labels come from lengths and never from token ids, so padding may be EOS without hiding the EOS that is
    trained. decoder_start: first input of a seq2seq decoder, None for a causal model.
    """

    pad: int
    decoder_start: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
        """input_ids, attention_mask [B, L], labels [B, L or M], and decoder_input_ids [B, M] of a seq2seq model."""
        inputs, labels = [row["input_ids"] for row in rows], [row["labels"] for row in rows]
        batch = {
            "input_ids": _pad(inputs, self.pad),
            "attention_mask": _pad([[1] * len(ids) for ids in inputs], 0),
            "labels": _pad(labels, IGNORED),
        }
        if self.decoder_start is not None:
            batch["decoder_input_ids"] = _pad([[self.decoder_start, *ids[:-1]] for ids in labels], self.pad)
        return batch


def _pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def token_losses(logits: Tensor, labels: Tensor, *, seq2seq: bool) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats [B, n], 0 where there is no label, and the mask of labels [B, n].

    logits [B, L, V] of a causal model predict the label of the next position, of a seq2seq model that of their own.
    """
    if not seq2seq:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses, labels != IGNORED
