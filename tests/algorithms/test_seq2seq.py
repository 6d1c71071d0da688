"""Scores of sequence-to-sequence policies: those of the plainest computation, whatever stands beside an episode."""

from typing import Any

import pytest
import torch
from scored_episodes import counted
from tiny_models import VOCAB, shared_lm
from tiny_seq2seq import (
    FAMILIES,
    PROMPTS,
    RESPONSES,
    T,
    actor_critic,
    episodes,
    make_seq2seq,
    naive,
    row_of,
    shared_seq2seq,
)
from torch import Tensor

from algorithms.packing import unpack_mask
from algorithms.policy import ActorCritic, LanguageModel
from algorithms.ppo import max_ratio

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
KINDS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "restricted": {"restricted": True},
    "both": {"restricted": True, "temperature": 0.7},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
# float32 through four layers with another order of summation
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@EVERY_KIND
@EVERY_FAMILY
def test_scores_are_those_of_full_logits_without_padding(family: str, kind: dict[str, Any]) -> None:
    lm, inputs = shared_seq2seq(family), episodes(**kind)
    model = LanguageModel(lm)
    with torch.no_grad():
        scores = model(**inputs, unrestricted=True)
    for b, length in enumerate(RESPONSES):
        prompt, response = row_of(inputs, b)
        logits, states = naive(lm, prompt, response, model.start_token_id)
        z = logits[:-1].double() / inputs["temperature"]
        raw, rows = z.log_softmax(1), torch.arange(length)
        if inputs["action_mask"] is not None:
            z = z.masked_fill(~unpack_mask(inputs["action_mask"][b, :length], VOCAB), -torch.inf)
        logp = z.log_softmax(1)
        entropy = -(logp.exp() * logp.clamp(min=-1e9)).sum(1)
        expected = {"logprobs": logp[rows, response], "raw_logprobs": raw[rows, response], "entropy": entropy}
        for name, values in expected.items():
            got = getattr(scores, name)
            torch.testing.assert_close(got[b, :length], values.float(), **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
            assert got.dtype == torch.float32 and not got[b, length:].any()
        torch.testing.assert_close(scores.states[b, : length + 1], states, **TOLERANCE)
    assert scores.states.shape == (len(PROMPTS), T + 1, model.state_size) and scores.values is None


@EVERY_FAMILY
def test_token_logits_are_those_of_each_counted_token(family: str) -> None:
    lm, inputs = shared_seq2seq(family), episodes()
    model = LanguageModel(lm)
    with torch.no_grad():
        got = model.token_logits(*(inputs[f"{x}_{y}"] for x in ("prompt", "response") for y in ("ids", "mask")))
    rows = [naive(lm, *row_of(inputs, b), model.start_token_id)[0][:-1] for b in range(len(PROMPTS))]
    torch.testing.assert_close(got, torch.cat(rows), **TOLERANCE)


@SHARED
@EVERY_FAMILY
def test_values_come_from_the_decoder_before_each_token_and_after_the_last(family: str, shared: bool) -> None:
    model, inputs = actor_critic(family, shared=shared), episodes()
    start = model.policy.start_token_id
    with torch.no_grad():
        scores = model(**inputs)
        for b, length in enumerate(RESPONSES):
            prompt, response = row_of(inputs, b)
            if shared:
                _, states = naive(model.policy.lm, prompt, response, start)
            else:
                ids = torch.cat([torch.tensor([start]), response])[None]
                mask = torch.ones_like(ids)
                out = model.critic(input_ids=prompt[None], decoder_input_ids=ids, decoder_attention_mask=mask)
                states = out.last_hidden_state[0]
            expected = model.value_head(states).squeeze(1)
            torch.testing.assert_close(scores.values[b, : length + 1], expected, **TOLERANCE)
    assert scores.values.shape == (len(PROMPTS), T + 1) and scores.states is None


@EVERY_KIND
@EVERY_FAMILY
def test_scoring_twice_gives_ratio_exactly_one(family: str, kind: dict[str, Any]) -> None:
    model, inputs = actor_critic(family), episodes(**kind)
    with torch.no_grad():
        old = model(**inputs, unrestricted=True)
    new, mask = model(**inputs), inputs["response_mask"]
    assert torch.equal(new.logprobs, old.logprobs) and torch.equal(new.values, old.values)
    assert max_ratio(new.logprobs, old.logprobs, mask) == 1


def dirty(inputs: dict[str, Any]) -> dict[str, Any]:
    """Any tokens where there was padding."""
    found, noise = dict(inputs), torch.Generator().manual_seed(8)
    for name in ("prompt", "response"):
        mask = inputs[f"{name}_mask"].bool()
        random = torch.randint(VOCAB, mask.shape, generator=noise)
        found[f"{name}_ids"] = torch.where(mask, inputs[f"{name}_ids"], random)
        assert not torch.equal(found[f"{name}_ids"], inputs[f"{name}_ids"])
    found["action_mask"] = torch.where(inputs["response_mask"][..., None], inputs["action_mask"], 0)
    return found


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """More padding on each side."""
    pad: dict[str, tuple[int, ...]] = {name: (3, 0) for name in ("prompt_ids", "prompt_mask")}
    pad |= {"response_ids": (0, 2), "response_mask": (0, 2), "action_mask": (0, 0, 0, 2)}
    return {**inputs, **{name: torch.nn.functional.pad(inputs[name], widths) for name, widths in pad.items()}}


@pytest.mark.parametrize("change", [dirty, wide])
@EVERY_FAMILY
def test_padding_changes_nothing(family: str, change: Any) -> None:
    model, inputs = actor_critic(family), episodes(restricted=True)
    with torch.no_grad():
        clean, got = (counted(model(**x), x["response_mask"]) for x in (inputs, change(inputs)))
    torch.testing.assert_close(got, clean, **TOLERANCE)


@EVERY_FAMILY
def test_the_rest_of_the_batch_changes_nothing(family: str) -> None:
    model, inputs = actor_critic(family), episodes(restricted=True)

    def rows(some: list[int]) -> dict[str, Any]:
        return {name: x[some] if isinstance(x, Tensor) else x for name, x in inputs.items()}

    with torch.no_grad():
        whole = model(**inputs)
        for some in ([0], [1], [3, 2]):
            part = model(**rows(some))
            for name in ("logprobs", "entropy"):
                torch.testing.assert_close(getattr(part, name), getattr(whole, name)[some], **TOLERANCE)
            seen = torch.arange(T + 1) <= torch.tensor(RESPONSES)[some, None]
            torch.testing.assert_close(part.values[seen], whole.values[some][seen], **TOLERANCE)


@EVERY_FAMILY
def test_the_prompt_and_earlier_tokens_matter_and_later_ones_do_not(family: str) -> None:
    model, inputs = LanguageModel(shared_seq2seq(family)), episodes()
    prompt, response = inputs["prompt_ids"].clone(), inputs["response_ids"].clone()
    prompt[0, -1], response[0, 4] = 30, 31
    with torch.no_grad():
        before = model(**inputs).logprobs[0]
        other_prompt = model(**{**inputs, "prompt_ids": prompt}).logprobs[0]
        other_token = model(**{**inputs, "response_ids": response}).logprobs[0]
    assert (other_prompt - before).abs().max() > 1e-3
    torch.testing.assert_close(other_token[:4], before[:4], **TOLERANCE)
    assert ((other_token - before)[4:].abs() > 1e-3).any()


@EVERY_FAMILY
def test_the_decoder_starts_with_the_configs_token_or_the_one_given(family: str) -> None:
    lm, inputs = shared_seq2seq(family), episodes()
    prompt, response = row_of(inputs, 0)
    scores = {}
    for given in (None, 5):
        model = LanguageModel(lm, decoder_start_token_id=given)
        start = lm.config.decoder_start_token_id if given is None else given
        assert model.start_token_id == start
        with torch.no_grad():
            scores[given] = model(**inputs).logprobs[0]
        expected = naive(lm, prompt, response, start)[0][:-1].log_softmax(1)[torch.arange(T), response]
        torch.testing.assert_close(scores[given], expected, **TOLERANCE)
    assert ((scores[None] - scores[5]).abs() > 1e-4).any()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_decoder_without_a_start_token_is_refused_with_the_way_out(family: str) -> None:
    lm = make_seq2seq(family, decoder_start_token_id=None)
    with pytest.raises(ValueError, match="no decoder_start_token_id in its config.*set env.args.context_start_token"):
        LanguageModel(lm)
    assert LanguageModel(lm, decoder_start_token_id=0).start_token_id == 0
    for outside in (VOCAB, -1):
        with pytest.raises(ValueError, match=f"start token {outside} is outside the model's vocabulary of {VOCAB}"):
            LanguageModel(lm, decoder_start_token_id=outside)


def test_causal_models_start_with_the_prompt_alone() -> None:
    assert LanguageModel(shared_lm("gpt2"), decoder_start_token_id=5).start_token_id is None


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_policy_without_values_has_neither_critic_nor_head(family: str) -> None:
    policy, inputs = LanguageModel(shared_seq2seq(family)), episodes()
    model = ActorCritic(policy, values=False)
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"policy"} and model.value_head is None
    with torch.no_grad():
        scores, expected = model(**inputs), policy(**inputs)
    assert torch.equal(scores.logprobs, expected.logprobs) and scores.values is None and scores.states is None
    with pytest.raises(ValueError, match="values=False"):
        ActorCritic(policy, shared_seq2seq(family), values=False)
