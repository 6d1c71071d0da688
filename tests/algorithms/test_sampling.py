"""The pieces of sampling: packed masks, inverting the CDF, and what each step may sample."""

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from algorithms.packing import pack_mask, unpack_mask
from algorithms.sampling import SamplingSpec, allowed_tokens, invert_cdf

LARGEST_UNIFORM = 1 - 2**-24


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 37, 64])
def test_packed_masks_come_back_as_they_were(vocab: int) -> None:
    mask = torch.rand(3, 4, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.5
    packed = pack_mask(mask)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 4, -(-vocab // 8))
    assert torch.equal(unpack_mask(packed, vocab), mask)
    assert torch.equal(unpack_mask(pack_mask(torch.ones(vocab, dtype=torch.bool)), vocab), torch.ones(vocab) > 0)


def test_the_lowest_id_is_the_highest_bit() -> None:
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 0] = mask[0, 7] = mask[1, 8] = True
    assert pack_mask(mask).tolist() == [[0b10000001, 0], [0, 0b10000000]]


def test_inverting_the_cdf_gives_every_token_its_share_of_the_uniforms() -> None:
    logits = torch.tensor([0.5, -1.0, -torch.inf, 2.0, 0.0, -torch.inf, -8.0, -torch.inf])
    n = 200_000
    uniforms = (torch.arange(n) + 0.5) / n
    ids = invert_cdf(logits.expand(n, -1), uniforms, 0.7)
    shares = torch.bincount(ids, minlength=8) / n
    torch.testing.assert_close(shares, (logits / 0.7).softmax(0), rtol=0, atol=1.01 / n)
    assert (ids.diff() >= 0).all()


def test_inverting_the_cdf_is_exact_at_the_edges_of_tokens() -> None:
    # Probabilities 1/4, 0, 1/2, 1/8, 1/8 and their cumulative sums are exact in floating point.
    logits = torch.tensor([0.25, 0.0, 0.5, 0.125, 0.125]).log()
    below = torch.tensor([0.25, 0.75, 0.875]) - 2**-24
    uniforms = torch.cat([torch.tensor([0.0, 0.25, 0.75, 0.875, LARGEST_UNIFORM]), below])
    assert invert_cdf(logits.expand(8, -1), uniforms, 1.0).tolist() == [0, 2, 3, 4, 4, 0, 2, 3]


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM, 1.0], ids=["first", "last", "rounded up to one"])
def test_tokens_without_mass_are_never_chosen(uniform: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 3001, generator=generator) * 4
    logits[torch.rand(200, 3001, generator=generator) < 0.9] = -torch.inf
    logits[:, [0, 1, -2, -1]] = -torch.inf
    ids = invert_cdf(logits, torch.full((200,), uniform), 0.9)
    assert logits.gather(1, ids[:, None]).isfinite().all()


def test_tokens_whose_probability_underflows_are_never_chosen() -> None:
    logits = torch.tensor([[-1e4, 0.0, -1e4, 0.0, -1e4]]).expand(3, -1)
    assert invert_cdf(logits, torch.tensor([0.0, 0.5, LARGEST_UNIFORM]), 1.0).tolist() == [1, 3, 3]


def test_nan_logits_give_a_token_of_the_vocabulary() -> None:
    assert invert_cdf(torch.full((2, 5), torch.nan), torch.tensor([0.0, 0.9]), 1.0).tolist() == [4, 4]


def allowed(probabilities: list[float], step: int = 0, eos: int = 0, **spec: float) -> list[bool]:
    logits = torch.tensor([probabilities]).log()
    full = SamplingSpec(max_new_tokens=9, **spec)
    result: list[bool] = allowed_tokens(logits, step, full, [eos])[0].tolist()
    return result


@pytest.mark.parametrize("step, banned", [(0, True), (1, True), (2, False), (3, False)])
def test_eos_is_banned_for_the_first_min_new_tokens(step: int, banned: bool) -> None:
    logits, spec = torch.zeros(2, 5), SamplingSpec(max_new_tokens=9, min_new_tokens=2)
    result = allowed_tokens(logits, step, spec, [1, 3])
    assert result.tolist() == [[True, not banned, True, not banned, True]] * 2


def test_top_k_keeps_the_k_best() -> None:
    assert allowed([0.1, 0.4, 0.2, 0.3], top_k=2) == [False, True, False, True]
    assert allowed([0.1, 0.4, 0.2, 0.3], top_k=9) == [True] * 4
    assert allowed([0.1, 0.4, 0.2, 0.3], top_k=0) == [True] * 4


def test_the_token_that_crosses_top_p_stays() -> None:
    assert allowed([0.1, 0.5, 0.15, 0.25], top_p=0.6) == [False, True, False, True]
    assert allowed([0.1, 0.5, 0.15, 0.25], top_p=0.4) == [False, True, False, False]
    assert allowed([0.1, 0.5, 0.15, 0.25], top_p=1e-9) == [False, True, False, False]
    assert sum(allowed([0.5, 0.5], top_p=0.5)) == 1, "a set that has exactly top_p is full"


def test_top_k_counts_tokens_that_min_new_tokens_left() -> None:
    assert allowed([0.4, 0.3, 0.2, 0.1], top_k=2, min_new_tokens=1) == [False, True, True, False]


def test_top_p_is_of_the_distribution_that_temperature_and_top_k_left() -> None:
    flat = [0.4, 0.3, 0.2, 0.1]
    assert allowed(flat, top_p=0.45) == [True, True, False, False]
    assert allowed(flat, top_p=0.45, temperature=0.5) == [True, False, False, False]
    assert allowed(flat, top_p=0.56) == [True, True, False, False]
    assert allowed(flat, top_p=0.56, top_k=2) == [True, False, False, False]


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(max_new_tokens=9, min_new_tokens=2, temperature=0.7, top_k=9, top_p=0.8),
        SamplingSpec(max_new_tokens=9, temperature=1.7, top_p=0.5),
        SamplingSpec(max_new_tokens=9, top_k=1),
    ],
)
def test_the_allowed_tokens_are_those_of_transformers(spec: SamplingSpec, step: int) -> None:
    logits = torch.randn(50, 61, generator=torch.Generator().manual_seed(0)) * 2
    eos = [5, 7]
    chain = LogitsProcessorList(
        [
            MinNewTokensLengthLogitsProcessor(4, spec.min_new_tokens, eos),
            TemperatureLogitsWarper(spec.temperature),
            *([TopKLogitsWarper(spec.top_k)] if spec.top_k else []),
            *([TopPLogitsWarper(spec.top_p)] if spec.top_p < 1 else []),
        ]
    )
    expected: Tensor = chain(torch.zeros(50, 4 + step, dtype=torch.int64), logits.clone()).isfinite()
    assert torch.equal(allowed_tokens(logits, step, spec, eos), expected)
    assert not expected.all()


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.5}, {"do_sample": False}])
def test_nothing_is_restricted_by_default(kwargs: dict[str, float]) -> None:
    assert not SamplingSpec(max_new_tokens=9, **kwargs).restricts


@pytest.mark.parametrize("kwargs", [{"top_k": 5}, {"top_p": 0.9}, {"min_new_tokens": 1}])
def test_each_restriction_asks_for_the_action_mask(kwargs: dict[str, float]) -> None:
    assert SamplingSpec(max_new_tokens=9, **kwargs).restricts
