"""Responses of encoder-decoders: one encoding, cache and shrinking batch against one token at a time without them."""

import pytest
import torch
from tiny_models import EOS, PAD, make_prompts
from tiny_seq2seq import FAMILIES, make_seq2seq
from torch import Tensor

from algorithms.packing import unpack_mask
from algorithms.policy import LanguageModel
from algorithms.sampling import SamplingSpec, allowed_tokens, sample_responses

T = 9
STOPS = [EOS, *range(11, 18)]
LENGTHS = [7, 3, 5, 1, 7, 2]
SPECS = {
    "plain": SamplingSpec(max_new_tokens=T),
    "restricted": SamplingSpec(max_new_tokens=T, min_new_tokens=2, temperature=0.7, top_k=20, top_p=0.95),
    "forced": SamplingSpec(max_new_tokens=T, forced_bos_token_id=9, forced_eos_token_id=EOS),
}


def naive(model: LanguageModel, prompt: Tensor, u: Tensor, spec: SamplingSpec) -> tuple[list[int], list[list[bool]]]:
    """One response and the tokens allowed at each step: no batch, no padding, no cache; float64 probabilities."""
    assert model.start_token_id is not None
    ids, masks = [model.start_token_id], []
    for step in range(T):
        inputs = {"input_ids": prompt[None], "decoder_input_ids": torch.tensor([ids])}
        mask = torch.ones_like(inputs["decoder_input_ids"])
        with torch.no_grad():
            logits = model.lm(**inputs, decoder_attention_mask=mask, use_cache=False).logits[:, -1].float()
        allowed = allowed_tokens(logits, step, spec, STOPS)
        z = logits.double().masked_fill(~allowed, -torch.inf) / spec.temperature
        ids.append(int((z.softmax(1).cumsum(1) <= u[step].double()).sum()))
        masks.append(allowed[0].tolist())
        if ids[-1] in STOPS:
            break
    return ids[1:], masks


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_responses_are_those_of_a_naive_loop_after_one_encoding(family: str, name: str) -> None:
    spec, model = SPECS[name], LanguageModel(make_seq2seq(family))
    prompts, mask = make_prompts(LENGTHS, width=9)
    u = torch.rand(len(LENGTHS), T, generator=torch.Generator().manual_seed(5))
    encodings: list[int] = []
    hook = model.lm.get_encoder().register_forward_pre_hook(lambda *_: encodings.append(1))
    got = sample_responses(model, prompts, mask, u, spec, eos_token_ids=STOPS, pad_token_id=PAD)
    hook.remove()
    assert len(encodings) == 1
    assert got.lengths.min() < got.lengths.max() or name != "plain"  # rows left the batch at different steps
    for row in range(len(LENGTHS)):
        expected, masks = naive(model, prompts[row][mask[row].bool()], u[row], spec)
        assert got.ids[row, : got.lengths[row]].tolist() == expected
        assert (got.action_mask is None) == (name == "plain")
        if got.action_mask is not None:
            assert unpack_mask(got.action_mask[row, : len(masks)], model.vocab_size).tolist() == masks
