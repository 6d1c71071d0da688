"""Sampling responses, and the set of tokens each step was allowed to sample (the action mask).

Random numbers come in as uniforms, one per sequence and token, and are turned into tokens by inverting the cumulative
distribution: who draws them decides what is reproducible, and nothing here has a state.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """How tokens are chosen: min_new_tokens bans EOS, then temperature, top_k (0 = off) and top_p (1 = off) apply.

    With `do_sample=False` the likeliest token is taken.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    do_sample: bool = True

    @property
    def restricts(self) -> bool:
        """Whether any step may forbid a token, so that the action mask has to be stored and replayed."""
        return self.min_new_tokens > 0 or self.top_k > 0 or self.top_p < 1.0


@dataclass(kw_only=True)
class Responses:
    """ids: int64 [B, T], padded on the right. lengths: int64 [B]. action_mask: packed [B, T, ceil(V/8)], or None."""

    ids: Tensor
    lengths: Tensor
    action_mask: Tensor | None


_BITS = (128, 64, 32, 16, 8, 4, 2, 1)


def pack_mask(mask: Tensor) -> Tensor:
    """Boolean [..., V] → uint8 [..., ceil(V/8)], eight tokens a byte, the lowest id in the highest bit."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    packed: Tensor = (padded * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack_mask(packed: Tensor, vocab_size: int) -> Tensor:
    """Inverse of `pack_mask`: uint8 [..., ceil(V/8)] → boolean [..., V]."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    bits: Tensor = (packed.unsqueeze(-1) & weights).bool().flatten(-2)[..., :vocab_size]
    return bits


def allowed_tokens(logits: Tensor, step: int, spec: SamplingSpec, eos_token_ids: list[int]) -> Tensor:
    """Boolean [B, V]: what min_new_tokens, top_k and top_p leave at `step` (0-based). logits: float32 [B, V]."""
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if step < spec.min_new_tokens:
        allowed[:, eos_token_ids] = False
    scaled = logits.masked_fill(~allowed, -torch.inf) / spec.temperature
    if 0 < spec.top_k < logits.shape[1]:
        kth_best = scaled.topk(spec.top_k).values[:, -1:]
        allowed &= scaled >= kth_best
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    if spec.top_p < 1.0:
        probs, order = scaled.softmax(1).sort(1, descending=True)
        before = probs.cumsum(1) - probs  # the token that crosses top_p stays
        allowed &= torch.zeros_like(allowed).scatter(1, order, before < spec.top_p)
    return allowed


def invert_cdf(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Token ids int64 [B] with softmax(logits / temperature) inverted at `uniforms` [B]; -inf is never chosen.

    Cheaper than `torch.multinomial` at large V, and a pure function of its arguments.
    """
    # In float32, on a GPU, sums of zeros may differ in the last digit and so give mass to tokens that have none.
    cdf = (logits / temperature).softmax(1).cumsum(1, dtype=torch.float64)
    total = cdf[:, -1]
    # Rounding may lift u·total to total itself, where no entry is larger; step back to the last one that has mass.
    threshold = torch.minimum(uniforms.to(cdf) * total, torch.nextafter(total, torch.zeros_like(total)))
    # NaN logits give the last token, not one outside the vocabulary: scoring says what is wrong, a device assert not.
    return torch.searchsorted(cdf, threshold[:, None], right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


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


def _empty_cache(lm: PreTrainedModel, capacity: int) -> DynamicCache:
    cache = DynamicCache(config=lm.config)
    cache.layers = [_PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _keep_rows(cache: DynamicCache, keep: Tensor) -> bool:
    """Drop all other rows from the cache. False, and nothing done, where a layer (of a state-space model) cannot."""
    if not all(hasattr(layer, "batch_select_indices") for layer in cache.layers):
        return False
    cache.batch_select_indices(keep)
    return True


def takes_position_ids(lm: PreTrainedModel) -> bool:
    """Whether the model's forward has position_ids (ALiBi families such as BLOOM derive positions from the mask)."""
    return "position_ids" in inspect.signature(lm.forward).parameters


def positions(mask: Tensor) -> Tensor:
    """Position of each token, counted over the mask only, so that left padding does not shift it. [B, L] → [B, L]."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def sample_responses(
    lm: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    uniforms: Tensor,
    spec: SamplingSpec,
    *,
    eos_token_ids: list[int],
    stop_on_eos: bool = True,
    pad_token_id: int,
) -> Responses:
    """Sample one response per prompt from a causal language model, with a key-value cache.

    prompt_ids, prompt_mask: [B, P] left-padded; uniforms: [B, T] in [0, 1), T = spec.max_new_tokens.
    A response ends with its first EOS, which it includes (only where `stop_on_eos`), or after T tokens.
    Finished rows leave the batch, so the cost follows the tokens that are really sampled.
    """
    batch, device = len(prompt_ids), prompt_ids.device
    ids = torch.full((batch, spec.max_new_tokens), pad_token_id, device=device)
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    packed: list[Tensor] = []
    rows = torch.arange(batch, device=device)  # which response each row of the shrinking batch belongs to
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    stop = torch.tensor(eos_token_ids if stop_on_eos else [], dtype=torch.int64, device=device)
    room = torch.ones(batch, spec.max_new_tokens, dtype=prompt_mask.dtype, device=device)
    mask = torch.cat([prompt_mask, room], 1)
    position_ids, needs_positions = positions(mask), takes_position_ids(lm)
    width, tokens, start = prompt_ids.shape[1], prompt_ids, 0
    cache = _empty_cache(lm, width + spec.max_new_tokens)
    for step in range(spec.max_new_tokens):
        end = width + step
        place = {"position_ids": position_ids[rows, start:end]} if needs_positions else {}
        out = lm(tokens, attention_mask=mask[rows, :end], cache=cache, use_cache=True, logits_to_keep=1, **place)
        if cache.get_seq_length() != end:
            raise ValueError(f"{type(lm).__name__} keeps no key-value cache: no responses can be sampled from it")
        logits, start = out.logits[:, -1].float(), end
        if spec.restricts:
            allowed = allowed_tokens(logits, step, spec, eos_token_ids)
            logits = logits.masked_fill(~allowed, -torch.inf)
            packed.append(_scatter_rows(pack_mask(allowed), rows, batch))
        token = invert_cdf(logits, uniforms[rows, step], spec.temperature) if spec.do_sample else logits.argmax(1)
        ids[rows[alive], step] = token[alive]
        lengths[rows[alive]] += 1
        alive &= ~torch.isin(token, stop)
        living = int(alive.sum())
        if living == 0:
            break
        if living <= 0.75 * len(rows) and _keep_rows(cache, keep := alive.nonzero().squeeze(1)):
            rows, token, alive = rows[keep], token[keep], alive[keep]
        tokens = token[:, None]
    return Responses(ids=ids, lengths=lengths, action_mask=_stack_steps(packed, spec) if packed else None)


def _scatter_rows(part: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Put the packed masks of the rows still in the batch back in their place; finished rows get all ones."""
    return part.new_full((batch, part.shape[1]), 255).index_copy(0, rows, part)


def _stack_steps(packed: list[Tensor], spec: SamplingSpec) -> Tensor:
    """[B, T, ceil(V/8)] from the steps taken; steps that nobody reached are all ones."""
    missing = [torch.full_like(packed[0], 255)] * (spec.max_new_tokens - len(packed))
    return torch.stack(packed + missing, 1)
