"""TRPO's logits and their second derivatives on tiny language models of several families, causal and not."""

import copy
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, counting_calls, first_layer, length_mask, make_lm, make_prompts
from tiny_seq2seq import make_seq2seq
from torch import Tensor

from algorithms.packing import pack_mask
from algorithms.policy import LanguageModel
from algorithms.trpo import (
    double_differentiable,
    fisher_vector_product,
    kl_here,
    kl_sum,
    restricted_logits,
    surrogate,
    trust_region_step,
)
from algorithms.trust_region import assign, flatten, trainable

CAUSAL = ["gpt2", "llama", "mistral", "gemma2", "bloom", "opt"]
SEQ2SEQ = ["t5", "bart"]


def make_policy(family: str) -> LanguageModel:
    return LanguageModel(make_lm(family) if family in CAUSAL else make_seq2seq(family))


def responses() -> dict[str, Tensor]:
    prompt_ids, prompt_mask = make_prompts([5, 2, 7])
    generator = torch.Generator().manual_seed(2)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "response_ids": torch.randint(4, VOCAB, (3, 6), generator=generator),
        "response_mask": length_mask(torch.tensor([6, 0, 3]), 6),
    }


def sampled_with(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """A temperature and a random action mask that holds the chosen tokens."""
    allowed = torch.rand(3, 6, VOCAB, generator=torch.Generator().manual_seed(3)) < 0.5
    allowed.scatter_(2, inputs["response_ids"][..., None], True)
    return {"temperature": 0.7, "action_mask": pack_mask(allowed)}


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bart"])
def test_rows_are_the_distributions_that_the_policy_scores_with(family: str) -> None:
    policy, inputs = make_policy(family), responses()
    mask, sampling = inputs["response_mask"], sampled_with(inputs)
    with torch.no_grad():
        scores = policy(**inputs, **sampling)
        logits = restricted_logits(policy, **inputs, **sampling)
    assert logits.shape == (9, VOCAB) and logits.dtype == torch.float32
    logprobs = logits.log_softmax(1)
    chosen = logprobs.gather(1, inputs["response_ids"][mask][:, None])[:, 0]
    torch.testing.assert_close(chosen, scores.logprobs[mask], rtol=1e-5, atol=1e-5)
    entropy = -(logprobs.exp() * logprobs.nan_to_num(neginf=0)).sum(1)
    torch.testing.assert_close(entropy, scores.entropy[mask], rtol=1e-5, atol=1e-5)
    assert 0.3 < logits.isneginf().float().mean() < 0.6


@pytest.mark.parametrize("family", CAUSAL + SEQ2SEQ)
def test_second_derivatives_are_exact_under_the_attention_that_models_choose(family: str) -> None:
    """F·v equals that of plain eager attention, and vᵀF·v = Σ Var_π(∂logits/∂θ · v), found without any gradient."""
    policy, inputs = make_policy(family), responses()
    sampling, params = sampled_with(inputs), trainable(policy)
    old = flatten(params)
    vector = torch.randn(len(old), generator=torch.Generator().manual_seed(4))

    def product(model: LanguageModel) -> Tensor:
        def kl(part: dict[str, Tensor]) -> Tensor:
            return kl_here(restricted_logits(model, **part, **sampling))

        return fisher_vector_product(kl, vector, trainable(model), [inputs], 9.0, lambda x: x)

    def raw_logits(at: Tensor) -> Tensor:
        assign(params, at)
        with torch.no_grad():
            return restricted_logits(policy, **inputs, **sampling)

    found = product(policy)
    plain = copy.deepcopy(policy)
    plain.lm.set_attn_implementation("eager")
    torch.testing.assert_close(found, product(plain), rtol=1e-4, atol=1e-5 * float(found.abs().max()))
    directional = (raw_logits(old + 3e-5 * vector) - raw_logits(old - 3e-5 * vector)).nan_to_num() / 6e-5
    assign(params, old)
    p = raw_logits(old).softmax(1)
    variance = (p * directional**2).sum(1) - (p * directional).sum(1) ** 2
    assert float(vector @ found) == pytest.approx(float(variance.sum()) / 9, rel=5e-3)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_language_model_takes_a_step_inside_its_trust_region(family: str) -> None:
    policy, inputs = make_policy(family), responses()
    sampling, mask = sampled_with(inputs), inputs["response_mask"]
    policy.lm.get_input_embeddings().requires_grad_(False)
    frozen = policy.lm.get_input_embeddings().weight.clone()
    with torch.no_grad():
        old_logprobs = policy(**inputs, **sampling).logprobs
    advantages = torch.randn(3, 6, generator=torch.Generator().manual_seed(5))

    def pick(rows: slice) -> tuple[dict[str, Tensor], dict[str, Any]]:
        packed = sampling["action_mask"][rows]
        return {name: x[rows] for name, x in inputs.items()}, {"temperature": 0.7, "action_mask": packed}

    def objective(rows: slice) -> Tensor:
        part, how = pick(rows)
        return surrogate(policy(**part, **how).logprobs, old_logprobs[rows], advantages[rows], mask[rows])[0]

    def logits(rows: slice) -> Tensor:
        part, how = pick(rows)
        return restricted_logits(policy, **part, **how)

    before = logits(slice(None)).detach()
    metrics = trust_region_step(
        trainable(policy),
        [slice(0, 1), slice(1, 2), slice(2, 3)],  # the second has no token
        objective=objective,
        logits=logits,
        n_tokens=9.0,
        reduce=lambda total: total,
    )
    assert metrics["policy/line_search_success"] == 1.0 and metrics["policy/surrogate_improvement"] > 0
    kl = float(kl_sum(before, logits(slice(None)).detach())) / 9
    assert 0 < kl < 0.01 and metrics["policy/kl"] == pytest.approx(kl, rel=1e-3)
    assert torch.equal(policy.lm.get_input_embeddings().weight, frozen)


def test_checkpointed_layers_give_the_same_product_if_they_recompute_in_the_context() -> None:
    policy, inputs = LanguageModel(make_lm("gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)), responses()
    vector = torch.randn(len(flatten(trainable(policy))), generator=torch.Generator().manual_seed(4))

    def product() -> Tensor:
        def kl(part: dict[str, Tensor]) -> Tensor:
            return kl_here(restricted_logits(policy, **part))

        return fisher_vector_product(kl, vector, trainable(policy), [inputs], 9.0, lambda x: x)

    expected = product()
    policy.lm.activation_checkpointing_enable({"use_reentrant": False})
    with counting_calls(first_layer(policy.lm).mlp) as calls, double_differentiable(policy.train()):
        torch.testing.assert_close(product(), expected, rtol=1e-5, atol=1e-6)
    assert len(calls) > 1


def test_an_attention_without_second_derivative_is_refused_with_the_fix() -> None:
    policy, inputs = make_policy("gpt2"), responses()
    policy.lm.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*attn_implementation='sdpa'"):
        restricted_logits(policy, **inputs)


def test_the_choice_of_attention_ends_with_the_forward() -> None:
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    policy, inputs = make_policy("gpt2"), responses()
    inside = []
    policy.lm.base_model.register_forward_pre_hook(lambda *_: inside.append(torch.backends.cuda.flash_sdp_enabled()))
    restricted_logits(policy, **inputs)
    with torch.no_grad():
        restricted_logits(policy, **inputs)
    assert inside == [False, True]
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()) == before
