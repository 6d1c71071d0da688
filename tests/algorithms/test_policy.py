"""Scoring: what one teacher-forced forward says of responses that were sampled from the same model."""

import pytest
import torch
from scored_episodes import SPECS, actor_critic, counted, episodes
from tiny_models import FAMILIES, VOCAB, naive_logits, shared_lm

from algorithms.packing import unpack_mask
from algorithms.policy import LanguageModel
from algorithms.ppo import max_ratio, policy_loss
from algorithms.sampling import SamplingSpec

EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
# float32 through two layers with another order of summation
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


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
