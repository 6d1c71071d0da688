"""Sampling responses, and the set of tokens each step was allowed to sample (the action mask).

Random numbers come in as uniforms, one per sequence and token, and are turned into tokens by inverting the cumulative
distribution: who draws them decides what is reproducible, and nothing here has a state.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.decoding import Decoding
from algorithms.nlpo import mask_statistics, top_mask
from algorithms.packing import pack_mask
from algorithms.policy import LanguageModel


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """NLPO's mask: see `algorithms.nlpo.top_mask`. always_allowed: tokens that are in every mask (EOS)."""

    mask_type: str
    size: float
    min_tokens_to_keep: int = 1
    always_allowed: tuple[int, ...] = ()

    @property
    def restricts(self) -> bool:
        """False where the mask is known to hold every token."""
        return not (self.mask_type == "learned_top_p" and self.size >= 1)


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """How tokens are chosen: NLPO's mask, then min_new_tokens (bans EOS), then temperature, top_k (0 = off) and top_p
    (1 = off). A forced token is the only one allowed at the first or the last step, whatever else applies.

    With `do_sample=False` the likeliest token is taken.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    do_sample: bool = True
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    mask: MaskSpec | None = None

    @property
    def restricts(self) -> bool:
        """Whether any step may forbid a token, so that the action mask has to be stored and replayed."""
        forced = self.forced_bos_token_id is not None or self.forced_eos_token_id is not None
        masked = self.mask is not None and self.mask.restricts
        return masked or forced or self.min_new_tokens > 0 or self.top_k > 0 or self.top_p < 1.0

    def free(self, n_steps: int) -> Tensor:
        """bool [n_steps], True where the token is sampled, not forced: a forced one says nothing of the policy."""
        return torch.tensor([self.forced(step) is None for step in range(n_steps)])

    def forced(self, step: int) -> int | None:
        """The one token allowed at `step` (0-based), or None."""
        if step == self.max_new_tokens - 1 and self.forced_eos_token_id is not None:
            return self.forced_eos_token_id
        return self.forced_bos_token_id if step == 0 else None


@dataclass(kw_only=True)
class Responses:
    """ids: int64 [B, T], padded on the right. lengths: int64 [B]. action_mask: packed [B, T, ceil(V/8)], or None.
    mask_statistics: float32 [B, T, 3] (see `algorithms.nlpo.mask_statistics`), or None without NLPO's mask."""

    ids: Tensor
    lengths: Tensor
    action_mask: Tensor | None
    mask_statistics: Tensor | None = None


def allowed_tokens(
    logits: Tensor, step: int, spec: SamplingSpec, eos_token_ids: list[int], mask: Tensor | None = None
) -> Tensor:
    """Boolean [B, V]: what `spec` leaves at `step` (0-based). logits: float32 [B, V]; mask: NLPO's, bool [B, V]."""
    allowed = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask.clone()
    if (forced := spec.forced(step)) is not None:
        allowed = torch.zeros_like(allowed)
        allowed[:, forced] = True
        return allowed
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


def nlpo_mask(own: Tensor, masking: Tensor | None, step: int, spec: SamplingSpec, eos_token_ids: list[int]) -> Tensor:
    """NLPO's mask at `step`, bool [B, V], with the tokens that are always allowed. own, masking: float32 [B, V], the
    logits of the policy and of the mask policy (None for "topk", which has none)."""
    assert spec.mask is not None
    logits = own if masking is None else masking
    if step < spec.min_new_tokens:  # EOS is banned here, so it must not be all that the mask holds
        logits = logits.index_fill(1, torch.tensor(eos_token_ids, device=logits.device, dtype=torch.int64), -torch.inf)
    options = {"mask_type": spec.mask.mask_type, "min_tokens_to_keep": spec.mask.min_tokens_to_keep}
    mask = top_mask(logits, size=spec.mask.size, **options)  # type: ignore[arg-type]
    mask[:, list(spec.mask.always_allowed)] = True
    return mask


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


@torch.no_grad()
def sample_responses(
    model: LanguageModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    uniforms: Tensor,
    spec: SamplingSpec,
    *,
    eos_token_ids: list[int],
    stop_on_eos: bool = True,
    pad_token_id: int,
    mask_model: LanguageModel | None = None,
    going_on: Callable[[bool], bool] = bool,
) -> Responses:
    """Sample one response per prompt, with a key-value cache. `mask_model`: NLPO's mask policy, if spec.mask needs one.

    prompt_ids, prompt_mask: [B, P] left-padded; uniforms: [B, T] in [0, 1), T = spec.max_new_tokens.
    A response ends with its first EOS, which it includes (only where `stop_on_eos`), or after T tokens.
    Finished rows leave the batch, so the cost follows the tokens that are really sampled.
    `going_on(a row is unfinished)` says after each step whether another follows: where ranks have to go in step, as
    long as any rank has an unfinished row. Those that are done go on with one row, whose tokens are thrown away.
    """
    batch, device = len(prompt_ids), prompt_ids.device
    ids = torch.full((batch, spec.max_new_tokens), pad_token_id, device=device)
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    packed: list[Tensor] = []
    stats: list[Tensor] = []
    rows = torch.arange(batch, device=device)  # which response each row of the shrinking batch belongs to
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    stop = torch.tensor(eos_token_ids if stop_on_eos else [], dtype=torch.int64, device=device)
    used = [model] if mask_model is None else [model, mask_model]
    decodings = [Decoding(m, prompt_ids, prompt_mask, spec.max_new_tokens) for m in used]
    token: Tensor | None = None
    for step in range(spec.max_new_tokens):
        logits, *masking = [decoding.advance(token) for decoding in decodings]
        mask = None
        if spec.mask is not None:
            mask = nlpo_mask(logits, masking[0] if masking else None, step, spec, eos_token_ids)
            stats.append(_scatter_rows(mask_statistics(logits, mask, spec.temperature), rows, batch, 0.0))
        token, allowed = choose(logits, uniforms[rows, step], step, spec, eos_token_ids, mask)
        if allowed is not None:
            packed.append(_scatter_rows(pack_mask(allowed), rows, batch, 255))
        ids[rows[alive], step] = token[alive]
        lengths[rows[alive]] += 1
        alive &= ~torch.isin(token, stop)
        living = int(alive.sum())
        if not going_on(living > 0):
            break
        if max(living, 1) <= 0.75 * len(rows) and all(decoding.can_drop for decoding in decodings):
            keep = alive.nonzero().squeeze(1) if living else torch.zeros_like(rows[:1])
            for decoding in decodings:
                decoding.keep(keep)
            rows, token, alive = rows[keep], token[keep], alive[keep]
    taken = int(lengths.max())  # later steps were those of other ranks
    return Responses(
        ids=ids,
        lengths=lengths,
        action_mask=_stack_steps(packed[:taken], spec, 255) if packed else None,
        mask_statistics=_stack_steps(stats[:taken], spec, 0.0) if stats else None,
    )


def choose(
    logits: Tensor, uniforms: Tensor, step: int, spec: SamplingSpec, eos_token_ids: list[int], mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(tokens int64 [B], allowed bool [B, V]; None where nothing is ever forbidden) of one step."""
    allowed = None
    if spec.restricts:
        allowed = allowed_tokens(logits, step, spec, eos_token_ids, mask)
        logits = logits.masked_fill(~allowed, -torch.inf)
    token = invert_cdf(logits, uniforms, spec.temperature) if spec.do_sample else logits.argmax(1)
    if allowed is not None:
        outside = ~allowed.gather(1, token[:, None]).squeeze(1)
        # NaN logits give any token; scoring says which sample they are of.
        assert not outside.any() or logits[outside].isnan().any(1).all(), "a token outside of the action mask"
    return token, allowed


def _scatter_rows(part: Tensor, rows: Tensor, batch: int, blank: float) -> Tensor:
    """Put what belongs to the rows still in the batch back in their place; finished rows get `blank`."""
    return part.new_full((batch, part.shape[1]), blank).index_copy(0, rows, part)


def _stack_steps(parts: list[Tensor], spec: SamplingSpec, blank: float) -> Tensor:
    """[B, T, n] from the steps taken, each [B, n]; steps that nobody reached are `blank`."""
    missing = [torch.full_like(parts[0], blank)] * (spec.max_new_tokens - len(parts))
    return torch.stack(parts + missing, 1)
