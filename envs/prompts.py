"""From a sample's prompt to the token ids that a model is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from envs.samples import Sample


class Prompt(NamedTuple):
    """ids: without padding; text: the prompt without special tokens, after truncation."""

    ids: list[int]
    text: str


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Tokenizes prompts, with the tokenizer's special tokens (T5's end-of-sequence stays when a prompt is cut).

    max_length: tokens of a prompt, special tokens included, context_start_token not
    truncation_side: "left" keeps the end of a prompt that is too long, "right" its start
    context_start_token: appended to every prompt (for causal models); None = none
    empty_prompt_token: stands for a prompt that has no tokens; None = such a prompt is an error
    The tokenizer's own padding and truncation are switched off.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_length: int
    truncation_side: Literal["left", "right"] = "left"
    context_start_token: int | None = None
    empty_prompt_token: int | None = None

    def __post_init__(self) -> None:
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if self.truncation_side not in ("left", "right"):
            raise ValueError(f"prompt_truncation_side must be 'left' or 'right', not {self.truncation_side!r}")
        if self.max_length <= self._n_special:
            raise ValueError(f"max_prompt_length {self.max_length} has no room beside {self._n_special} special tokens")

    @property
    def width(self) -> int:
        """The number of columns that hold any prompt."""
        return self.max_length + (self.context_start_token is not None)

    @property
    def _n_special(self) -> int:
        return int(self.tokenizer.num_special_tokens_to_add(False))

    def __call__(self, sample: Sample) -> Prompt:
        """Raises ValueError for a prompt without tokens, or with tokens that the model does not have."""
        encoding = self.tokenizer.encode(sample.prompt, add_special_tokens=False)
        room = self.max_length - self._n_special
        cut = len(encoding.ids) > room
        if cut:
            encoding.truncate(room, direction=self.truncation_side)
        ids = list(self.tokenizer.post_process(encoding).ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=True) if cut else sample.prompt
        if not ids and self.empty_prompt_token is not None:
            ids = [self.empty_prompt_token]
        if self.context_start_token is not None:
            ids.append(self.context_start_token)
        if not ids:
            raise ValueError(f"sample {sample.sample_id!r}: its prompt has no tokens, and no empty_prompt_token is set")
        if max(ids) >= self.vocab_size:
            raise ValueError(
                f"sample {sample.sample_id!r}: its prompt has token {max(ids)}, but the model's vocabulary has only"
                f" {self.vocab_size}: tokenizer and model do not belong together"
            )
        return Prompt(ids, text)


def pad_left(prompts: Sequence[Sequence[int]], width: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """ids [n, width] with padding on the left, and mask [n, width] with 1 where there is a token."""
    ids = np.full((len(prompts), width), pad, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask
