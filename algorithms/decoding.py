"""A model fed token by token, with its key-value cache: the next token's logits of the rows still alive."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from algorithms.padding import positions, to_right
from algorithms.policy import LanguageModel


class _PreallocatedLayer(DynamicLayer):
    """Keys and values written into room for the whole sequence: the stock layer copies everything at each token."""

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.room = [x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in (key_states, value_states)]
        self.keys, self.values = (x[:, :, :0] for x in self.room)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        self.keys, self.values = (x[:, :, :end] for x in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        assert self.keys is not None
        length = self.keys.shape[2]
        self.room = [x[indices] for x in self.room]
        self.keys, self.values = (x[:, :, :length] for x in self.room)


def _causal_cache(lm: PreTrainedModel, capacity: int) -> DynamicCache:
    cache = DynamicCache(config=lm.config)
    cache.layers = [_PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _seq2seq_cache(capacity: int) -> EncoderDecoderCache:
    # Layers come one by one: a configuration need not say how many a decoder has.
    decoder, encoder = DynamicCache(), DynamicCache()
    decoder.layer_class_to_replicate = partial(_PreallocatedLayer, capacity)  # type: ignore[assignment]
    return EncoderDecoderCache(decoder, encoder)


class Decoding:
    """The responses to a batch of prompts while they are sampled from one model.

    prompt_ids, prompt_mask: [B, P] left-padded. `advance` gives the logits of each next token; `keep` drops rows. The
    encoder of a sequence-to-sequence model runs once, here.
    """

    def __init__(self, model: LanguageModel, prompt_ids: Tensor, prompt_mask: Tensor, max_new_tokens: int) -> None:
        self.lm, self.is_seq2seq = model.lm, model.start_token_id is not None
        self.cache: Any
        if model.start_token_id is not None:
            ids, self.mask = to_right(prompt_ids, prompt_mask)
            self.encoded = self.lm.get_encoder()(input_ids=ids, attention_mask=self.mask)
            self.next = torch.full_like(ids[:, :1], model.start_token_id)
            self.cache, self.length = _seq2seq_cache(max_new_tokens), 0
            return
        room = torch.ones(len(prompt_ids), max_new_tokens, dtype=prompt_mask.dtype, device=prompt_mask.device)
        self.mask = torch.cat([prompt_mask, room], 1)
        self.position_ids = positions(self.mask) if model.needs_positions else None
        self.next, self.length = prompt_ids, 0
        self.cache = _causal_cache(self.lm, prompt_ids.shape[1] + max_new_tokens)

    def advance(self, token: Tensor | None = None) -> Tensor:
        """Float32 logits [rows, V] of what follows `token` (int64 [rows]; None: of the first token of a response).

        Raises ValueError for a model that keeps no key-value cache.
        """
        tokens = self.next if token is None else token[:, None]
        start, end = self.length, self.length + tokens.shape[1]
        if self.is_seq2seq:
            inputs = {"decoder_input_ids": tokens, "encoder_outputs": self.encoded, "attention_mask": self.mask}
        else:
            inputs = {"input_ids": tokens, "attention_mask": self.mask[:, :end], "logits_to_keep": 1}
            if self.position_ids is not None:
                inputs["position_ids"] = self.position_ids[:, start:end]
        logits: Tensor = self.lm(**inputs, cache=self.cache, use_cache=True).logits[:, -1].float()
        if self.cache.get_seq_length() != end:
            raise ValueError(f"{type(self.lm).__name__} keeps no key-value cache: no responses can be sampled from it")
        self.length = end
        return logits

    @property
    def can_drop(self) -> bool:
        """Whether rows can leave the batch: not where a layer (of a state-space model) cannot let them go."""
        caches = (
            (self.cache.self_attention_cache, self.cache.cross_attention_cache) if self.is_seq2seq else [self.cache]
        )
        return all(hasattr(layer, "batch_select_indices") for cache in caches for layer in cache.layers)

    def keep(self, rows: Tensor) -> None:
        """Drop all but these rows (int64 [n])."""
        self.cache.batch_select_indices(rows.cpu())  # its layers may lie on several devices
        self.mask = self.mask[rows]
        if self.is_seq2seq:
            self.encoded.last_hidden_state = self.encoded.last_hidden_state[rows]
        elif self.position_ids is not None:
            self.position_ids = self.position_ids[rows]
