"""Where logits and values come from: one run of each trunk, the head on what counts, fp32 from there on."""

import contextlib

import pytest
import torch
from scored_episodes import SPECS, T, actor_critic, episodes
from tiny_models import (
    CONFIGS,
    FAMILIES,
    VOCAB,
    counting_calls,
    first_layer,
    make_lm,
    make_prompts,
    naive_logits,
    shared_lm,
)
from transformers import AutoModelForCausalLM, BertConfig, CohereConfig, GraniteConfig

from algorithms.forward import Head
from algorithms.policy import ActorCritic, LanguageModel
from algorithms.sampling import SamplingSpec

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
# float32 through two layers with another order of summation
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


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


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_two_ranks_in_step_call_the_head_equally_often(family: str) -> None:
    lm = make_lm(family)
    model, inputs = LanguageModel(lm), dict(episodes(lm, SPECS["all"]))
    model.logits_chunk_bytes = 4 * VOCAB * 6
    asked: list[int] = []
    calls, gradients = [], []
    for mask in (inputs["response_mask"], torch.zeros_like(inputs["response_mask"])):
        inputs["response_mask"] = mask
        alone = model(**inputs)
        model.agree = lambda mine: asked.append(mine) or 3
        with counting_calls(lm.get_output_embeddings()) as shapes:
            scores = model(**inputs)
            (scores.logprobs + scores.entropy).sum().backward()
        model.agree = int
        assert torch.equal(scores.logprobs, alone.logprobs) and torch.equal(scores.entropy, alone.entropy)
        calls.append(len(shapes))
        gradients.append([p.grad.abs().max() for p in model.parameters()])
        model.zero_grad()
    assert asked == [3, 1] and calls == ([6, 6] if model.head else [1, 1]), "each again in the backward pass"
    assert not any(gradients[1]) and any(gradients[0])


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
    assert LanguageModel(lm).head == (None if family == "gemma2" else Head())
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
    assert model.head is None
    torch.testing.assert_close(scores.logprobs[0, 0], first, **TOLERANCE)


def test_values_are_as_wide_as_the_states_and_not_as_the_layers() -> None:
    lm, critic = (make_lm("opt", seed=seed, word_embed_proj_dim=16) for seed in (0, 1))  # as in OPT-350m
    model = ActorCritic(LanguageModel(lm), critic.base_model)
    with torch.no_grad():
        assert model(**episodes(lm, SPECS["plain"])).values.shape == (4, T + 1)
    assert model.value_head.in_features == 16 != lm.config.hidden_size


@pytest.mark.parametrize("mixed", [False, True], ids=["bfloat16 weights", "autocast"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_half_precision_logits_are_scored_in_float32(family: str, mixed: bool) -> None:
    model = LanguageModel(make_lm(family) if mixed else make_lm(family).bfloat16())
    prompt_ids, prompt_mask = make_prompts([4])
    everything = {
        "prompt_ids": prompt_ids.expand(VOCAB, -1),
        "prompt_mask": prompt_mask.expand(VOCAB, -1),
        "response_ids": torch.arange(VOCAB)[:, None],
        "response_mask": torch.ones(VOCAB, 1, dtype=torch.bool),
    }
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16) if mixed else contextlib.nullcontext():
        scores = model(**everything)
    assert scores.logprobs.dtype == scores.entropy.dtype == scores.raw_logprobs.dtype == torch.float32
    # The same logits in every row: probabilities of all tokens sum to one, to float32's precision and not bfloat16's.
    assert float(scores.logprobs.exp().sum()) == pytest.approx(1, abs=2e-6)
    expected = -(scores.logprobs.double().exp() * scores.logprobs).sum()
    assert float(scores.entropy[0, 0]) == pytest.approx(float(expected), abs=5e-6)


@pytest.mark.parametrize("spec", [SPECS["plain"], SPECS["all"]], ids=["plain", "all"])
def test_half_precision_gives_ratio_one_too(spec: SamplingSpec) -> None:
    model = ActorCritic(LanguageModel(make_lm("gpt2").bfloat16()), make_lm("gpt2").base_model.bfloat16())
    torch.nn.init.normal_(model.value_head.weight)
    inputs = episodes(model.policy.lm, spec)
    with torch.no_grad():
        old = model(**inputs)
    new = model(**inputs)
    assert torch.equal(new.logprobs, old.logprobs) and torch.equal(new.values, old.values)
    assert new.values.dtype == torch.float32


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(ValueError, match="BertLMHeadModel is not causal"):
        LanguageModel(AutoModelForCausalLM.from_config(config).eval())


def test_a_value_head_that_was_cast_still_gives_float32() -> None:
    model = ActorCritic(LanguageModel(make_lm("gpt2"))).bfloat16()
    torch.nn.init.normal_(model.value_head.weight)
    states = torch.randn(5, 4, model.policy.state_size)
    expected = (states.double() @ model.value_head.weight.double().T)[..., 0].float()
    with counting_calls(model.value_head) as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        values = model.value_of(states)
    assert values.dtype == torch.float32 and model.value_head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(values, expected, **TOLERANCE)
    assert calls == [states.shape], "as a module: an engine's hooks are on it"
    assert "value_head.weight" in model.state_dict()
