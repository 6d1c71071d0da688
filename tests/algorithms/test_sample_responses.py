"""Whole responses: the fast way (cache, padding, a shrinking batch) against one token at a time without any of it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
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
from transformers import Lfm2Config, MambaConfig, OpenAIGPTConfig, PreTrainedModel

from algorithms.packing import unpack_mask
from algorithms.padding import takes_position_ids
from algorithms.sampling import MaskSpec, Responses, SamplingSpec, allowed_tokens, sample_responses

T = 9
STOPS = [EOS, *range(11, 18)]
LENGTHS = [7, 3, 5, 1, 7, 2]
PLAIN = SamplingSpec(max_new_tokens=T)
RESTRICTED = SamplingSpec(max_new_tokens=T, min_new_tokens=2, temperature=0.7, top_k=20, top_p=0.95)


def uniforms(rows: int, seed: int = 5) -> Tensor:
    return torch.rand(rows, T, generator=torch.Generator().manual_seed(seed))


def sample(
    lm: PreTrainedModel,
    prompts: tuple[Tensor, Tensor],
    u: Tensor,
    spec: SamplingSpec = PLAIN,
    stop_on_eos: bool = True,
    going_on: Callable[[bool], bool] = bool,
) -> Responses:
    # Not a LanguageModel: its probes would be counted among the calls.
    model: Any = SimpleNamespace(lm=lm, needs_positions=takes_position_ids(lm), start_token_id=None)
    options: Any = {"eos_token_ids": STOPS, "stop_on_eos": stop_on_eos, "pad_token_id": PAD, "going_on": going_on}
    return sample_responses(model, *prompts, u, spec, **options)


def naive(lm: PreTrainedModel, prompt: Tensor, u: Tensor, spec: SamplingSpec) -> tuple[list[int], list[list[bool]]]:
    """One response and the tokens allowed at each step: no batch, no padding, no cache; float64 probabilities."""
    ids, masks = prompt.tolist(), []
    for step in range(T):
        logits = naive_logits(lm, ids)[-1:]
        allowed = allowed_tokens(logits, step, spec, STOPS)
        z = logits.double().masked_fill(~allowed, -torch.inf) / spec.temperature
        ids.append(int((z.softmax(1).cumsum(1) <= u[step].double()).sum()))
        masks.append(allowed[0].tolist())
        if ids[-1] in STOPS:
            break
    return ids[len(prompt) :], masks


@pytest.mark.parametrize("spec", [PLAIN, RESTRICTED], ids=["plain", "restricted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_responses_are_those_of_a_naive_loop(family: str, spec: SamplingSpec) -> None:
    lm, (ids, mask), u = shared_lm(family), make_prompts(LENGTHS, width=9), uniforms(len(LENGTHS))
    with counting_calls(first_layer(lm)) as shapes:
        got = sample(lm, (ids, mask), u, spec)
    expected = [naive(lm, ids[b][mask[b].bool()], u[b], spec) for b in range(len(ids))]
    assert [row[:n].tolist() for row, n in zip(got.ids, got.lengths, strict=True)] == [tokens for tokens, _ in expected]
    assert (got.ids[~length_mask(got.lengths, T)] == PAD).all()
    if spec.restricts:
        bits = unpack_mask(got.action_mask, VOCAB).tolist()
        assert [row[:n] for row, n in zip(bits, got.lengths, strict=True)] == [masks for _, masks in expected]
    else:
        assert got.action_mask is None
    assert [shape[1] for shape in shapes] == [9] + [1] * (int(got.lengths.max()) - 1), "one token a step"


def test_rows_that_ended_leave_the_batch() -> None:
    lm = shared_lm("gpt2")
    with counting_calls(first_layer(lm)) as shapes:
        got = sample(lm, make_prompts(LENGTHS * 4), uniforms(24))
    living = [int((got.lengths > step).sum()) for step in range(int(got.lengths.max()))]
    assert living[-1] < 6 and all(rows <= n / 0.75 for (rows, *_), n in zip(shapes, living, strict=True))


@pytest.mark.parametrize("more", [1, 3, T])
@pytest.mark.parametrize(
    "spec", [PLAIN, replace(RESTRICTED, mask=MaskSpec(mask_type="topk", size=8))], ids=["plain", "restricted"]
)
@pytest.mark.parametrize("lm", [shared_lm("gpt2"), shared_lm("mistral")], ids=["gpt2", "mistral"])
def test_who_goes_on_for_other_ranks_has_the_same_responses(lm: PreTrainedModel, spec: SamplingSpec, more: int) -> None:
    (ids, mask), u = make_prompts(LENGTHS * 4), uniforms(24)
    short = sample(lm, (ids, mask), u, spec).lengths < 6
    prompts, u = (ids[short], mask[short]), u[short]
    alone = sample(lm, prompts, u, spec)
    own = int(alone.lengths.max())
    steps, told = min(own + more, T), []
    with counting_calls(first_layer(lm)) as shapes:
        got = sample(lm, prompts, u, spec, going_on=lambda unfinished: told.append(unfinished) or len(told) < steps)
    assert own < T and len(u) > 2 and told == [True] * (own - 1) + [False] * (steps - own + 1)
    assert len(shapes) == steps and {shape[0] for shape in shapes[own:]} == {1}
    for name, expected in vars(alone).items():
        found = getattr(got, name)
        assert found is expected is None or torch.equal(found, expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_responses_are_those_of_generate(family: str) -> None:
    lm, (ids, mask) = shared_lm(family), make_prompts(LENGTHS)
    got = sample(lm, (ids, mask), uniforms(6), SamplingSpec(max_new_tokens=T, do_sample=False))
    generated = lm.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=T, eos_token_id=STOPS, pad_token_id=PAD
    )[:, ids.shape[1] :]
    assert torch.equal(got.ids[:, : generated.shape[1]], generated)
    assert int(got.lengths.max()) == generated.shape[1]


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_a_response_does_not_depend_on_the_rest_of_the_batch(family: str) -> None:
    lm, (ids, mask), u = shared_lm(family), make_prompts(LENGTHS), uniforms(6)
    together = sample(lm, (ids, mask), u, RESTRICTED)
    for rows in ([3], [5, 0], [1, 2, 4], [5, 4, 3, 2, 1, 0]):
        part = sample(lm, (ids[rows], mask[rows]), u[rows], RESTRICTED)
        assert torch.equal(part.ids, together.ids[rows]) and torch.equal(part.lengths, together.lengths[rows])
        counted = length_mask(part.lengths, T)
        assert torch.equal(part.action_mask[counted], together.action_mask[rows][counted])


def test_a_response_includes_its_eos_and_ends_there() -> None:
    got = sample(shared_lm("gpt2"), make_prompts(LENGTHS * 4), uniforms(24))
    is_stop = torch.isin(got.ids, torch.tensor(STOPS)) & length_mask(got.lengths, T)
    ends_with_stop = is_stop.gather(1, got.lengths[:, None] - 1).squeeze(1)
    assert (ends_with_stop | (got.lengths == T)).all()
    assert torch.equal(is_stop.sum(1), ends_with_stop.long()), "no EOS inside a response"
    assert {1, T} <= set(got.lengths.tolist())


def test_without_stop_on_eos_every_response_is_full_and_goes_on_after_eos() -> None:
    lm, (ids, mask), u = shared_lm("gpt2"), make_prompts(LENGTHS), uniforms(6)
    got, stopped = sample(lm, (ids, mask), u, stop_on_eos=False), sample(lm, (ids, mask), u)
    assert (got.lengths == T).all() and int(stopped.lengths.min()) < T
    counted = length_mask(stopped.lengths, T)
    assert torch.equal(got.ids[counted], stopped.ids[counted])
    after = got.ids[~counted]
    assert len(set(after.tolist())) > 1


def test_the_action_mask_contains_every_sampled_token_and_no_more_than_top_k() -> None:
    spec = SamplingSpec(max_new_tokens=T, top_k=3)
    got = sample(shared_lm("llama"), make_prompts(LENGTHS * 4), uniforms(24), spec)
    counted = length_mask(got.lengths, T)
    bits = unpack_mask(got.action_mask, VOCAB)[counted]
    assert bits.gather(1, got.ids[counted][:, None]).all() and (bits.sum(1) == 3).all()


def test_min_new_tokens_keeps_eos_out_of_the_beginning() -> None:
    spec = SamplingSpec(max_new_tokens=T, min_new_tokens=4)
    got = sample(shared_lm("gpt2"), make_prompts(LENGTHS * 4), uniforms(24), spec)
    assert int(got.lengths.min()) == 5
    bits = unpack_mask(got.action_mask, VOCAB)[length_mask(got.lengths, T)[:, :, None].expand(-1, -1, VOCAB)]
    assert not bits.view(-1, VOCAB).all() and not unpack_mask(got.action_mask, VOCAB)[:, :4, STOPS].any()


def test_one_token_responses() -> None:
    got = sample(shared_lm("gpt2"), make_prompts([2, 4]), uniforms(2), SamplingSpec(max_new_tokens=1, top_k=2))
    assert got.ids.shape == (2, 1) and got.lengths.tolist() == [1, 1] and got.action_mask.shape == (2, 1, 5)


@pytest.mark.parametrize("window", [2, 5, 8, 10, 40])
def test_a_sliding_window_smaller_or_larger_than_the_sequence(window: int) -> None:
    lm, (ids, mask), u = make_lm("mistral", sliding_window=window), make_prompts(LENGTHS), uniforms(6)
    got = sample(lm, (ids, mask), u)
    expected = [naive(lm, ids[b][mask[b].bool()], u[b], PLAIN)[0] for b in range(6)]
    assert [row[:n].tolist() for row, n in zip(got.ids, got.lengths, strict=True)] == expected


def test_gradient_checkpointing_leaves_the_cache_on() -> None:
    lm, prompts, u = make_lm("llama"), make_prompts(LENGTHS), uniforms(6)
    expected = sample(lm, prompts, u)
    lm.activation_checkpointing_enable()
    with counting_calls(first_layer(lm)) as shapes:
        got = sample(lm, prompts, u)
    assert torch.equal(got.ids, expected.ids) and {shape[1] for shape in shapes[1:]} == {1}


def test_hidden_defaults_of_the_generation_config_do_not_apply() -> None:
    lm, prompts, u = make_lm("gpt2"), make_prompts(LENGTHS), uniforms(6)
    expected = sample(lm, prompts, u)
    lm.generation_config.update(top_k=1, min_new_tokens=T, repetition_penalty=9.0, forced_eos_token_id=4)
    assert torch.equal(sample(lm, prompts, u).ids, expected.ids)


def test_rows_of_a_hybrid_model_stay_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {**CONFIGS["llama"][1], "layer_types": ["conv", "full_attention"]}
    args.pop("attention_dropout")
    monkeypatch.setitem(CONFIGS, "lfm2", (Lfm2Config, args))
    lm, (ids, mask), u = make_lm("lfm2"), make_prompts(LENGTHS), uniforms(6)
    got = sample(lm, (ids, mask), u)
    expected = [naive(lm, ids[b][mask[b].bool()], u[b], PLAIN)[0] for b in range(6)]
    assert [row[:n].tolist() for row, n in zip(got.ids, got.lengths, strict=True)] == expected


@pytest.mark.parametrize("config, heads", [(OpenAIGPTConfig, {"n_head": 4}), (MambaConfig, {})])
def test_a_model_without_a_key_value_cache_is_refused(
    config: type, heads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, **heads}
    monkeypatch.setitem(CONFIGS, "other", (config, args))
    with pytest.raises(ValueError, match="cache|Cache"):
        sample(make_lm("other"), make_prompts([3, 2]), uniforms(2))
