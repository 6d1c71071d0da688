"""Scoring: what one teacher-forced forward says of responses that were sampled from the same model."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tiny_models import (
    CONFIGS,
    EOS,
    FAMILIES,
    PAD,
    VOCAB,
    counting_calls,
    first_layer,
    length_mask,
    make_lm,
    make_prompts,
    naive_logits,
    shared_lm,
)
from torch import Tensor
from transformers import CohereConfig, GraniteConfig

from algorithms.policy import ActorCritic, LanguageModel, Scores
from algorithms.ppo import max_ratio, policy_loss
from algorithms.sampling import SamplingSpec, sample_responses, unpack_mask

T = 8
LENGTHS = [6, 2, 4, 1]
SPECS = {
    "plain": SamplingSpec(max_new_tokens=T),
    "temperature": SamplingSpec(max_new_tokens=T, temperature=0.7),
    "top_k": SamplingSpec(max_new_tokens=T, top_k=5),
    "top_p": SamplingSpec(max_new_tokens=T, top_p=0.8),
    "min_new_tokens": SamplingSpec(max_new_tokens=T, min_new_tokens=4),
    "all": SamplingSpec(max_new_tokens=T, temperature=0.7, top_k=15, top_p=0.9, min_new_tokens=2),
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
# float32 through two layers with another order of summation
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@functools.cache
def episodes(lm: torch.nn.Module, spec: SamplingSpec) -> Mapping[str, Any]:
    """Arguments of a forward: left-padded prompts, right-padded responses that were cut at several lengths."""
    prompt_ids, prompt_mask = make_prompts(LENGTHS, width=7)
    u = torch.rand(len(LENGTHS), T, generator=torch.Generator().manual_seed(4))
    got = sample_responses(
        lm, prompt_ids, prompt_mask, u, spec, eos_token_ids=[EOS], stop_on_eos=False, pad_token_id=PAD
    )
    mask = length_mask(torch.tensor([T, 3, 1, 6]), T)
    found = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "response_ids": torch.where(mask, got.ids, PAD),
        "response_mask": mask,
        "action_mask": got.action_mask,
        "temperature": spec.temperature,
    }
    return MappingProxyType(found)


@functools.cache
def actor_critic(family: str, *, shared: bool = False) -> ActorCritic:
    """Policy and critic of one family, with a value head that says something."""
    model = ActorCritic(LanguageModel(shared_lm(family)), None if shared else make_lm(family, seed=9).base_model)
    torch.manual_seed(2)
    torch.nn.init.normal_(model.value_head.weight, std=0.3)
    return model.eval()


def counted(scores: Scores, mask: Tensor) -> dict[str, Tensor]:
    """Everything that anyone may use: scores of counted tokens, values up to the one after the last."""
    state_mask = torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
    found = {name: getattr(scores, name)[mask] for name in ("logprobs", "entropy", "raw_logprobs")}
    return found if scores.values is None else {**found, "values": scores.values[state_mask]}


@EVERY_SPEC
@EVERY_FAMILY
def test_scoring_twice_gives_ratio_exactly_one(family: str, spec: SamplingSpec) -> None:
    model = actor_critic(family)
    inputs = episodes(model.policy.lm, spec)
    with torch.no_grad():
        old = model(**inputs, unrestricted=True)
    new, mask = model(**inputs), inputs["response_mask"]
    assert torch.equal(new.logprobs, old.logprobs) and torch.equal(new.values, old.values)
    advantages = torch.ones_like(old.logprobs)
    _, stats = policy_loss(
        logprobs=new.logprobs, old_logprobs=old.logprobs, advantages=advantages, response_mask=mask, clip_range=0.2
    )
    assert stats["policy/ratio"][0] == stats["policy/ratio"][1] and max_ratio(new.logprobs, old.logprobs, mask) == 1
    assert stats["policy/approx_kl"][0] == 0 and stats["policy/clip_fraction"][0] == 0


@EVERY_SPEC
@EVERY_FAMILY
def test_scores_are_those_of_full_logits_without_padding(family: str, spec: SamplingSpec) -> None:
    lm = shared_lm(family)
    inputs = episodes(lm, spec)
    with torch.no_grad():
        scores = LanguageModel(lm)(**inputs, unrestricted=True)
    for b, length in enumerate(inputs["response_mask"].sum(1).tolist()):
        prompt = inputs["prompt_ids"][b][inputs["prompt_mask"][b].bool()].tolist()
        response = inputs["response_ids"][b, :length]
        z = naive_logits(lm, prompt + response.tolist())[len(prompt) - 1 : -1].double() / spec.temperature
        raw = z.log_softmax(1)
        if inputs["action_mask"] is not None:
            z = z.masked_fill(~unpack_mask(inputs["action_mask"][b, :length], VOCAB), -torch.inf)
        logp = z.log_softmax(1)
        entropy = -(logp.exp() * logp.clamp(min=-1e9)).sum(1)
        rows = torch.arange(length)
        for name, expected in (
            ("logprobs", logp[rows, response]),
            ("raw_logprobs", raw[rows, response]),
            ("entropy", entropy),
        ):
            got = getattr(scores, name)
            torch.testing.assert_close(
                got[b, :length], expected.float(), **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert got.dtype == torch.float32 and not got[b, length:].any()


@EVERY_FAMILY
def test_garbage_in_padding_changes_nothing(family: str) -> None:
    model = actor_critic(family)
    inputs = episodes(model.policy.lm, SPECS["all"])
    garbage = torch.Generator().manual_seed(8)
    dirty = dict(inputs)
    for name, mask in (("prompt_ids", inputs["prompt_mask"].bool()), ("response_ids", inputs["response_mask"])):
        noise = torch.randint(VOCAB, mask.shape, generator=garbage)
        dirty[name] = torch.where(mask, inputs[name], noise)
        assert not torch.equal(dirty[name], inputs[name])
    dirty["action_mask"] = torch.where(inputs["response_mask"][..., None], inputs["action_mask"], 0)
    with torch.no_grad():
        clean, got = (counted(model(**x), inputs["response_mask"]) for x in (inputs, dirty))
    torch.testing.assert_close(got, clean, rtol=0, atol=0)


@EVERY_FAMILY
def test_the_amount_of_padding_changes_nothing(family: str) -> None:
    model = actor_critic(family)
    inputs = episodes(model.policy.lm, SPECS["all"])
    wide = {
        name: torch.nn.functional.pad(inputs[name], (3, 0)) if name.startswith("prompt") else inputs[name]
        for name in inputs
    }
    for name in ("response_ids", "response_mask"):
        wide[name] = torch.nn.functional.pad(inputs[name], (0, 2))
    wide["action_mask"] = torch.nn.functional.pad(inputs["action_mask"], (0, 0, 0, 2))
    with torch.no_grad():
        narrow, got = (counted(model(**x), x["response_mask"]) for x in (inputs, wide))
    torch.testing.assert_close(got, narrow, **TOLERANCE)


@EVERY_FAMILY
def test_tokens_between_counted_ones_are_seen_but_not_scored(family: str) -> None:
    model = actor_critic(family, shared=True)
    inputs = episodes(model.policy.lm, SPECS["temperature"])
    gaps = inputs["response_mask"].clone()
    gaps[:, 1] = False
    with torch.no_grad():
        whole, holes = model(**inputs), model(**{**inputs, "response_mask": gaps})
    torch.testing.assert_close(holes.logprobs, torch.where(gaps, whole.logprobs, 0), **TOLERANCE)
    torch.testing.assert_close(holes.values, whole.values, rtol=0, atol=0)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@EVERY_FAMILY
def test_one_forward_runs_each_trunk_once(family: str, shared: bool) -> None:
    model = actor_critic(family, shared=shared)
    inputs = episodes(model.policy.lm, SPECS["plain"])
    with counting_calls(first_layer(model.policy.lm)) as policy_calls, torch.no_grad():
        if shared:
            model(**inputs)
        else:
            with counting_calls(first_layer(model.critic)) as critic_calls:
                model(**inputs)
            assert [shape[:2] for shape in critic_calls] == [(4, 7 + T)]
    assert [shape[:2] for shape in policy_calls] == [(4, 7 + T)]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_the_head_sees_counted_positions_only_and_a_chunk_at_a_time(family: str) -> None:
    model = LanguageModel(shared_lm(family))
    inputs = episodes(model.lm, SPECS["plain"])
    model.logits_chunk_bytes = 4 * VOCAB * 6 + 5
    with counting_calls(model.lm.get_output_embeddings()) as calls, torch.no_grad():
        model(**inputs)
    rows = [shape[0] for shape in calls]
    n = int(inputs["response_mask"].sum())
    assert sum(rows) == n and set(rows[:-1]) == {6} and rows[-1] <= 6 and len(rows) > 2


@pytest.mark.parametrize("megabytes", [1, 64])
def test_chunks_are_sized_by_memory(megabytes: int) -> None:
    model = LanguageModel(shared_lm("gpt2"), logits_chunk_mb=megabytes)
    assert model.chunk_rows() == megabytes * 2**20 // (4 * VOCAB)
    with torch.no_grad():
        assert model.chunk_rows() <= megabytes * 2**20 // (4 * VOCAB)
    model.logits_chunk_bytes = 1
    assert model.chunk_rows() == 1


@pytest.mark.parametrize("scale", [0.5, 6.0], ids=["fresh", "sharp"])
@EVERY_FAMILY
def test_heads_that_do_more_than_multiply_are_found(family: str, scale: float) -> None:
    changes = {"final_logit_softcapping": 30.0} if family == "gemma2" else {}
    lm = make_lm(family, scale=scale, **changes).train()
    assert LanguageModel(lm).plain_head is (family != "gemma2")
    assert lm.training


@pytest.mark.parametrize("factor", [{"logits_scaling": 4.0}, {"logit_scale": 0.25}], ids=["granite", "cohere"])
def test_heads_that_scale_are_scored_with_their_scale(
    factor: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GraniteConfig if "logits_scaling" in factor else CohereConfig
    monkeypatch.setitem(CONFIGS, "scaled", (config, {**CONFIGS["qwen2"][1], **factor}))
    lm = make_lm("scaled")
    model = LanguageModel(lm)
    inputs = episodes(lm, SPECS["plain"])
    scores = model(**inputs)
    first = naive_logits(lm, inputs["prompt_ids"][0][1:].tolist())[-1].log_softmax(0)[inputs["response_ids"][0, 0]]
    assert not model.plain_head
    torch.testing.assert_close(scores.logprobs[0, 0], first, **TOLERANCE)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_half_precision_models_are_scored_in_float32(family: str) -> None:
    lm = make_lm(family).bfloat16()
    model = LanguageModel(lm)
    prompt_ids, prompt_mask = make_prompts([4])
    everything = {
        "prompt_ids": prompt_ids.expand(VOCAB, -1),
        "prompt_mask": prompt_mask.expand(VOCAB, -1),
        "response_ids": torch.arange(VOCAB)[:, None],
        "response_mask": torch.ones(VOCAB, 1, dtype=torch.bool),
    }
    with torch.no_grad():
        scores = model(**everything)
    assert scores.logprobs.dtype == scores.entropy.dtype == scores.raw_logprobs.dtype == torch.float32
    # The same logits in every row: probabilities of all tokens sum to one, to float32's precision and not bfloat16's.
    assert float(scores.logprobs.exp().sum()) == pytest.approx(1, abs=2e-6)
    expected = -(scores.logprobs.double().exp() * scores.logprobs).sum()
    assert float(scores.entropy[0, 0]) == pytest.approx(float(expected), abs=5e-6)


@pytest.mark.parametrize("spec", [SPECS["plain"], SPECS["all"]], ids=["plain", "all"])
def test_half_precision_gives_ratio_one_too(spec: SamplingSpec) -> None:
    model = ActorCritic(LanguageModel(make_lm("gpt2").bfloat16()), make_lm("gpt2").base_model.bfloat16())
    inputs = episodes(model.policy.lm, spec)
    with torch.no_grad():
        old = model(**inputs)
    new = model(**inputs)
    assert torch.equal(new.logprobs, old.logprobs) and torch.equal(new.values, old.values)
    assert new.values.dtype == torch.float32


def test_mixed_precision_scores_in_float32() -> None:
    model = LanguageModel(shared_lm("llama"))
    inputs = episodes(model.lm, SPECS["top_k"])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(**inputs)
    with torch.no_grad():
        exact = model(**inputs)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    assert not torch.equal(scores.logprobs, exact.logprobs), "autocast was on"
    # Two layers in bfloat16 (8 bits) move logits of order 10 by a few hundredths.
    torch.testing.assert_close(scores.logprobs, exact.logprobs, rtol=0, atol=0.3)
