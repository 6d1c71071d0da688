"""How sequence-to-sequence policies are run: one encoding, a head a chunk at a time, precision, copies, what fits."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from scored_episodes import counted
from tiny_models import PAD, VOCAB, counting_calls, make_prompts
from tiny_seq2seq import (
    FAMILIES,
    FAST,
    HEADS,
    PROMPTS,
    T,
    actor_critic,
    episodes,
    first_block,
    make_seq2seq,
    naive,
    shared_seq2seq,
)
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, EncoderDecoderConfig, GPT2Config, PreTrainedModel

from algorithms.policy import ActorCritic, LanguageModel

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])


@contextlib.contextmanager
def counting_blocks(model: PreTrainedModel) -> Iterator[tuple[list[torch.Size], list[torch.Size]]]:
    """Input shapes of every call of the first encoder block and of the first decoder block."""
    blocks = [first_block(stack) for stack in (model.get_encoder(), model.get_decoder())]
    with counting_calls(blocks[0]) as encoder, counting_calls(blocks[1]) as decoder:
        yield encoder, decoder


@SHARED
@EVERY_FAMILY
def test_one_forward_encodes_and_decodes_once(family: str, shared: bool) -> None:
    model, inputs = actor_critic(family, shared=shared), episodes()
    expected = ([(len(PROMPTS), 7)], [(len(PROMPTS), T + 1)])
    with contextlib.ExitStack() as stack, torch.no_grad():
        counts = [stack.enter_context(counting_blocks(m)) for m in (model.policy.lm, model.critic) if m is not None]
        model(**inputs)
    for calls in counts:
        assert tuple([shape[:2] for shape in each] for each in calls) == expected


@EVERY_FAMILY
def test_the_head_of_each_family_is_found(family: str) -> None:
    lm = make_seq2seq(family).train()
    model = LanguageModel(lm)
    assert model.head == HEADS[family] and model.state_size == 32 and lm.training


@pytest.mark.parametrize("family", ["bart", "mbart"])
def test_a_small_bias_is_found_and_one_of_zeros_costs_nothing(family: str) -> None:
    lm = make_seq2seq(family)
    with torch.no_grad():
        lm.get_output_embeddings().weight[PAD] = 1  # zeros otherwise: a logit of 0 that any bias shows in
    lm.final_logits_bias.fill_(1e-4)
    assert LanguageModel(lm).head.bias == "final_logits_bias"
    lm.final_logits_bias.zero_()
    assert LanguageModel(lm).head.bias is None


@pytest.mark.parametrize("family", FAST)
def test_the_head_sees_counted_positions_only_and_a_chunk_at_a_time(family: str) -> None:
    model, inputs = LanguageModel(shared_seq2seq(family)), episodes()
    model.logits_chunk_bytes = 4 * VOCAB * 4 + 5
    with counting_calls(model.lm.get_output_embeddings()) as calls, torch.no_grad():
        model(**inputs)
    rows = [shape[0] for shape in calls]
    assert sum(rows) == int(inputs["response_mask"].sum()) and max(rows) == 4 and len(rows) > 3


@pytest.mark.parametrize("mixed", [False, True], ids=["bfloat16 weights", "autocast"])
@EVERY_FAMILY
def test_half_precision_logits_are_scored_in_float32(family: str, mixed: bool) -> None:
    model = LanguageModel(make_seq2seq(family).to(torch.float32 if mixed else torch.bfloat16))
    assert model.head == HEADS[family]
    prompt_ids, prompt_mask = make_prompts([4])
    everything = {
        "prompt_ids": prompt_ids.expand(VOCAB, -1),
        "prompt_mask": prompt_mask.expand(VOCAB, -1),
        "response_ids": torch.arange(VOCAB)[:, None],
        "response_mask": torch.ones(VOCAB, 1, dtype=torch.bool),
    }
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16) if mixed else contextlib.nullcontext():
        scores = model(**everything)
    # The same logits in every row: probabilities of all tokens sum to one, to float32's precision and not bfloat16's.
    assert float(scores.logprobs.exp().sum()) == pytest.approx(1, abs=2e-6)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32


@EVERY_FAMILY
def test_half_precision_gives_the_same_scores_with_and_without_gradients(family: str) -> None:
    model, inputs = actor_critic(family, dtype=torch.bfloat16), episodes(restricted=True)
    with torch.no_grad():
        old = counted(model(**inputs), inputs["response_mask"])
    new = counted(model(**inputs), inputs["response_mask"])
    torch.testing.assert_close({name: x.detach() for name, x in new.items()}, old, rtol=0, atol=0)
    assert new["values"].dtype == torch.float32


@EVERY_FAMILY
def test_a_copy_has_a_head_of_its_own(family: str) -> None:
    model, inputs = LanguageModel(make_seq2seq(family)), episodes()
    with torch.no_grad():
        before = model(**inputs).logprobs
        lagged = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(lagged(**inputs).logprobs, before) and not torch.equal(model(**inputs).logprobs, before)


@EVERY_FAMILY
def test_a_saved_policy_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    model = LanguageModel(make_seq2seq(family))
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved").eval()
    prompt, response = torch.arange(5, 11), torch.arange(8, 12)
    expected, _ = naive(model.lm, prompt, response, model.start_token_id)
    assert torch.equal(naive(again, prompt, response, LanguageModel(again).start_token_id)[0], expected)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_decoder_that_sees_later_tokens_is_refused(family: str) -> None:
    lm = make_seq2seq(family)
    embed = lm.get_decoder().embed_tokens
    lm.get_decoder().embed_tokens = nn.Sequential(embed, Mixed())
    with pytest.raises(ValueError, match="ForConditionalGeneration is not causal"):
        LanguageModel(lm)


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def test_pairs_of_an_encoder_and_a_decoder_take_the_models_own_forward() -> None:
    side = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=3)
    pair = EncoderDecoderConfig.from_encoder_decoder_configs(copy.copy(side), side, decoder_start_token_id=1)
    torch.manual_seed(0)
    model = LanguageModel(AutoModelForSeq2SeqLM.from_config(pair).eval())
    inputs = episodes()
    with torch.no_grad():
        scores = ActorCritic(model)(**inputs)
    logits, _ = naive(model.lm, inputs["prompt_ids"][0][-6:], inputs["response_ids"][0], 1)
    expected = logits[:-1].log_softmax(1)[torch.arange(T), inputs["response_ids"][0]]
    assert model.head is None and scores.values.shape == (len(PROMPTS), T + 1)
    torch.testing.assert_close(scores.logprobs[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_tiny_models_of_the_tests_are_sequence_to_sequence(models: Callable[[str], Path], family: str) -> None:
    lm = AutoModelForSeq2SeqLM.from_pretrained(models(family)).eval()
    with torch.no_grad():
        scores = LanguageModel(lm)(*make_prompts([3, 2]), torch.tensor([[4, 1], [5, 6]]), torch.ones(2, 2).bool())
    assert (scores.logprobs < 0).all() and scores.states.shape == (2, 3, 32)
