"""Responses in evaluation: of either kind of model, by our sampler and by transformers, as each prompt alone gives."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from algorithms.policy import LanguageModel
from algorithms.sampling import SamplingSpec
from train.evaluation import generate
from train.generation import check_generation_kwargs

PAD, EOS, START, LONGEST = 0, 1, 2, 7
TOKENS = {"vocab_size": 20, "pad_token_id": PAD, "eos_token_id": EOS}
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 3]]


def make_model(family: str) -> LanguageModel:
    """With defaults of its own, as BART's checkpoints have, that must never apply; large weights: texts vary."""
    torch.manual_seed(3)
    if family == "gpt2":
        lm: Any = GPT2LMHeadModel(GPT2Config(**TOKENS, n_layer=1, n_embd=16, n_head=2, n_positions=32))
    elif family == "t5":
        size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        lm = T5ForConditionalGeneration(T5Config(**TOKENS, **size, decoder_start_token_id=START))
    else:
        layers = {
            f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))
        }
        heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
        size = {"d_model": 16, "max_position_embeddings": 32, **layers, **heads}
        lm = BartForConditionalGeneration(BartConfig(**TOKENS, **size, decoder_start_token_id=START))
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.7 * torch.randn(parameter.shape))
    lm.generation_config.forced_eos_token_id, lm.generation_config.num_beams = EOS, 4
    return LanguageModel(lm.eval())


def answers(model: LanguageModel, kwargs: dict[str, Any] | None, prompts: list[list[int]]) -> list[list[int]]:
    it = SimpleNamespace(
        spec=SimpleNamespace(generation_kwargs=kwargs),
        model=model,
        mask_model=None,
        precision=contextlib.nullcontext,
        sampler=SimpleNamespace(
            spec=SamplingSpec(max_new_tokens=LONGEST, do_sample=False),
            seed=4,
            eos_token_ids=[EOS],
            stop_on_eos=True,
            pad_token_id=PAD,
        ),
    )
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found, lengths = generate(it, "val", [PROMPTS.index(prompt) for prompt in prompts], ids, mask)
    return [row[:n].tolist() for row, n in zip(found, lengths, strict=True)]


@pytest.mark.parametrize("family", ["gpt2", "t5", "bart"])
@pytest.mark.parametrize(
    "kwargs", [None, {"min_new_tokens": 3}, {"num_beams": 3, "min_new_tokens": 2}, {"repetition_penalty": 3.0}]
)
def test_responses_are_those_of_each_prompt_alone(family: str, kwargs: dict[str, Any] | None) -> None:
    model = make_model(family)
    found = answers(model, kwargs, PROMPTS)
    model.lm.generation_config = type(model.lm.generation_config)()
    start = {} if family == "gpt2" else {"decoder_start_token_id": START}
    for prompt, response in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": LONGEST, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD, **start}
        (out,) = model.lm.generate(ids, attention_mask=torch.ones_like(ids), **{**options, **(kwargs or {})})
        assert response == out[len(prompt) if family == "gpt2" else 1 :].tolist()
        assert len(response) == LONGEST or response[-1] == EOS
    assert len(set(map(tuple, found))) > 1


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_a_checkpoints_own_defaults_stay_with_it(family: str) -> None:
    model = make_model(family)
    defaults = model.lm.generation_config
    first = answers(model, {"num_beams": 2}, PROMPTS)
    assert model.lm.generation_config is defaults and defaults.num_beams == 4
    defaults.num_beams, defaults.forced_eos_token_id, defaults.repetition_penalty = 1, None, 5.0
    assert answers(model, {"num_beams": 2}, PROMPTS) == first


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_sampling_draws_the_same_for_a_sample_in_any_batch(family: str) -> None:
    model = make_model(family)
    kwargs = {"do_sample": True, "temperature": 3.0}
    together = answers(model, kwargs, PROMPTS)
    assert together == [answers(model, kwargs, [prompt])[0] for prompt in PROMPTS]
    assert together != answers(model, None, PROMPTS)


def test_a_forced_token_may_be_asked_for() -> None:
    (response,) = answers(make_model("bart"), {"forced_bos_token_id": 13, "min_new_tokens": 2}, PROMPTS[:1])
    assert response[0] == 13 and len(response) > 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beems": 2}, "x.generation_kwargs: unknown keyword 'num_beems'.*num_beams"),
        ({"temperature": 0.0}, "x.generation_kwargs.temperature: expected float > 0, got 0.0"),
        ({"temperature": "hot"}, "x.generation_kwargs.temperature: expected float > 0, got 'hot'"),
        ({"top_k": 5.5}, "x.generation_kwargs.top_k: expected int >= 0, got 5.5"),
        ({"top_p": 2}, "x.generation_kwargs.top_p: expected float > 0 and <= 1, got 2"),
        ({"do_sample": "yes"}, "x.generation_kwargs.do_sample: expected true or false, got 'yes'"),
        ({"max_new_tokens": 0}, "x.generation_kwargs.max_new_tokens: expected int >= 1, got 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens .9. exceeds max_new_tokens .8."),
        ({"max_length": 5}, "x.generation_kwargs.max_length: the run decides that.*max_new_tokens"),
        ({"num_return_sequences": 2}, "x.generation_kwargs.num_return_sequences: the run decides that"),
        ({"pad_token_id": 2}, "x.generation_kwargs.pad_token_id: the run decides that"),
        ({"decoder_start_token_id": 2}, "x.generation_kwargs.decoder_start_token_id: the run decides that"),
    ],
)
def test_keywords_that_cannot_be_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_generation_kwargs(kwargs, "x.generation_kwargs")
