"""What a reward function or a metric sees of one episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from envs.samples import Sample


@dataclass
class Episode:
    """A prompt and the response so far. A step-wise reward at token t sees only the tokens 0..t.

    sample: the sample the prompt comes from, with its references and meta data
    prompt_text: the prompt as the model sees it, without special tokens (the sample's own text if nothing was cut off)
    response_ids: the sampled tokens; end-of-sequence is one of them
    terminated: the response ended with an end-of-sequence token
    truncated: the response was ended by the length limit
    decode: ids to text without special tokens; it is called only when somebody asks for a text
    text: the text of response_ids, if it is already known
    """

    sample: Sample
    prompt_text: str
    response_ids: list[int] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    decode: Callable[[Sequence[int]], str] | None = field(default=None, repr=False, compare=False)
    text: InitVar[str | None] = None

    def __post_init__(self, text: str | None) -> None:
        self._decoded: tuple[int, str] | None = None if text is None else (len(self.response_ids), text)

    @property
    def sample_id(self) -> str:
        return self.sample.sample_id

    @property
    def references(self) -> list[str]:
        return self.sample.references

    @property
    def meta(self) -> dict[str, Any]:
        return self.sample.meta

    @property
    def response_text(self) -> str:
        """The response so far, without special tokens."""
        return self._text(len(self.response_ids))

    def text_at(self, t: int) -> str:
        """The first t + 1 tokens as text, without special tokens. Raises IndexError if token t is not there (yet)."""
        if not 0 <= t < len(self.response_ids):
            raise IndexError(f"token {t} of a response of {len(self.response_ids)} tokens")
        return self._text(t + 1)

    def is_last(self, t: int) -> bool:
        """Whether token t is the one that ended the episode."""
        return (self.terminated or self.truncated) and t == len(self.response_ids) - 1

    def _text(self, n_tokens: int) -> str:
        if self._decoded is None or self._decoded[0] != n_tokens:
            if self.decode is None:
                raise ValueError(f"sample {self.sample_id!r}: this episode has no decode function, so no text")
            self._decoded = (n_tokens, self.decode(self.response_ids[:n_tokens]))
        return self._decoded[1]
