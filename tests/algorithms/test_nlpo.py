"""NLPO's mask: what is in it, at every size, and how it acts together with other restrictions."""

import pytest
import torch
from tiny_models import EOS, PAD, VOCAB, make_lm, make_prompts, shared_lm

from algorithms.nlpo import copy_weights, mask_statistics, top_mask
from algorithms.packing import unpack_mask
from algorithms.policy import LanguageModel
from algorithms.sampling import MaskSpec, Responses, SamplingSpec, sample_responses

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None]
T = 8
LENGTHS = [6, 2, 4, 1]


@pytest.mark.parametrize(
    ("size", "fewest", "kept"),
    [
        (0.4, 1, [1, 0, 0, 0]),  # the token that crosses stays
        (0.51, 1, [1, 1, 0, 0]),
        (0.9, 1, [1, 1, 1, 0]),
        (0.96, 1, [1, 1, 1, 1]),
        (1.0, 1, [1, 1, 1, 1]),
        (0.4, 3, [1, 1, 1, 0]),
        (0.4, 9, [1, 1, 1, 1]),
    ],
)
def test_learned_top_p(size: float, fewest: int, kept: list[int]) -> None:
    found = top_mask(LOGITS, mask_type="learned_top_p", size=size, min_tokens_to_keep=fewest)
    assert found.int().tolist() == [kept]
    swapped = top_mask(LOGITS[:, [3, 1, 0, 2]], mask_type="learned_top_p", size=size, min_tokens_to_keep=fewest)
    assert torch.equal(swapped, found[:, [3, 1, 0, 2]])


@pytest.mark.parametrize("mask_type", ["learned_top_k", "topk"])
def test_top_k(mask_type: str) -> None:
    for size, fewest, kept in ((1, 1, 1), (2, 1, 2), (2, 3, 3), (4, 1, 4), (9, 1, 4)):
        found = top_mask(LOGITS, mask_type=mask_type, size=size, min_tokens_to_keep=fewest)
        assert found.int().tolist() == [[1] * kept + [0] * (4 - kept)]


def test_a_mask_of_everything_holds_everything_even_where_rounding_says_otherwise() -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, :3] = 40.0  # the others have less than a float32 sum can tell
    assert top_mask(logits, mask_type="learned_top_p", size=1.0).all()
    assert not top_mask(logits, mask_type="learned_top_p", size=0.999999).all()


def test_statistics() -> None:
    allowed = torch.tensor([[False, True, True, False], [True, False, False, True]])
    found = mask_statistics(LOGITS.expand(2, 4), allowed, temperature=1.0)
    assert torch.allclose(found, torch.tensor([[2, 0.45, 0], [2, 0.55, 1]]))


def sample(spec: SamplingSpec, mask_family: str | None = "gpt2", seed: int = 5, stop: bool = False) -> Responses:
    """Responses of one random model inside the masks of another one."""
    prompts, u = make_prompts(LENGTHS, width=7), torch.rand(4, T, generator=torch.Generator().manual_seed(4))
    mask_model = None if mask_family is None else LanguageModel(make_lm(mask_family, seed=seed))
    model = LanguageModel(shared_lm("gpt2"))
    return sample_responses(
        model, *prompts, u, spec, eos_token_ids=[EOS], stop_on_eos=stop, pad_token_id=PAD, mask_model=mask_model
    )


def bits(got: Responses) -> torch.Tensor:
    assert got.action_mask is not None
    return unpack_mask(got.action_mask, VOCAB)


def spec(mask_type: str, size: float, **changes: object) -> SamplingSpec:
    mask = MaskSpec(mask_type=mask_type, size=size, always_allowed=(EOS,))
    return SamplingSpec(max_new_tokens=T, mask=mask, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mask_type", "size"), [("learned_top_p", 0.5), ("learned_top_k", 3), ("topk", 3)])
@pytest.mark.parametrize("stop", [False, True])
def test_the_sampled_token_is_in_the_mask_and_so_is_eos(mask_type: str, size: float, stop: bool) -> None:
    got = sample(spec(mask_type, size), None if mask_type == "topk" else "gpt2", stop=stop)
    counted = torch.arange(T) < got.lengths[:, None]
    inside = bits(got)
    assert inside.gather(2, got.ids[:, :, None])[counted].all()
    assert inside[counted][:, EOS].all() and not inside[counted].all()
    if mask_type != "learned_top_p":
        assert set(inside[counted].sum(1).tolist()) <= {3, 4}  # EOS comes on top where it is not among the best
    assert got.mask_statistics is not None and got.mask_statistics.shape == (4, T, 3)
    size_mass = got.mask_statistics[counted]
    assert torch.equal(size_mass[:, 0], inside[counted].sum(1).float())
    assert (size_mass[:, 1] > 0).all() and (size_mass[:, 1] <= 1 + 1e-6).all()
    assert (size_mass[:, 2] == 1).all() == (mask_type == "topk")  # its own best token is always in its own mask


def test_masks_follow_the_mask_policy_not_the_policy() -> None:
    one, same, other = (sample(spec("learned_top_k", 5), seed=seed) for seed in (5, 5, 6))
    assert torch.equal(bits(one), bits(same)) and torch.equal(one.ids, same.ids)
    assert not torch.equal(bits(one)[:, 0], bits(other)[:, 0])
    own = sample(spec("topk", 5), None)
    assert not torch.equal(bits(one)[:, 0], bits(own)[:, 0])


def test_a_mask_policy_equal_to_the_policy_gives_topk_with_the_shrinking_batch_too() -> None:
    mask_model = LanguageModel(make_lm("gpt2", seed=77))
    copy_weights(LanguageModel(shared_lm("gpt2")), mask_model)
    prompts, u = make_prompts(LENGTHS, width=7), torch.rand(4, T, generator=torch.Generator().manual_seed(4))
    shared = {"eos_token_ids": [EOS, *range(11, 18)], "pad_token_id": PAD}
    model = LanguageModel(shared_lm("gpt2"))
    learned = sample_responses(model, *prompts, u, spec("learned_top_k", 5), mask_model=mask_model, **shared)  # type: ignore[arg-type]
    own = sample_responses(model, *prompts, u, spec("topk", 5), **shared)  # type: ignore[arg-type]
    assert learned.lengths.min() + 1 > 1 and learned.lengths.min() < learned.lengths.max()
    assert torch.equal(learned.ids, own.ids) and torch.equal(bits(learned), bits(own))


def test_a_mask_of_everything_is_no_restriction_at_all() -> None:
    got, plain = sample(spec("learned_top_p", 1.0)), sample(SamplingSpec(max_new_tokens=T), None)
    assert got.action_mask is None and torch.equal(got.ids, plain.ids)
    assert got.mask_statistics is not None and (got.mask_statistics[:, :, 0] == VOCAB).all()


def test_min_new_tokens_bans_eos_inside_the_mask_and_leaves_a_token() -> None:
    got = sample(spec("learned_top_k", 1, min_new_tokens=4))
    inside = bits(got)
    assert not inside[:, :4, EOS].any() and inside[:, 4:, EOS].all()
    assert (inside[:, :4].sum(2) == 1).all()  # the best one that is not EOS


def test_top_k_chooses_among_what_the_mask_leaves() -> None:
    inside = bits(sample(spec("learned_top_k", 6, top_k=2)))
    wide = bits(sample(spec("learned_top_k", 6)))
    assert (inside[:, 0].sum(1) == 2).all() and (inside[:, 0] <= wide[:, 0]).all()


def test_forced_tokens() -> None:
    got = sample(SamplingSpec(max_new_tokens=T, forced_bos_token_id=9, forced_eos_token_id=EOS, min_new_tokens=T), None)
    assert (got.ids[:, 0] == 9).all() and (got.ids[:, -1] == EOS).all()
    inside = bits(got)
    assert (inside[:, 0].sum(1) == 1).all() and inside[:, 0, 9].all() and inside[:, -1, EOS].all()
    assert (inside[:, 1:-1].sum(2) == VOCAB - 1).all()
