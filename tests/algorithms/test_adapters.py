"""Policies with low-rank adapters: what is trained, what the reference is, and that it stays what it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import (
    FAMILIES,
    frozen_weights,
    kind,
    load,
    lora,
    loss_of,
    save_adapter,
    save_base,
    scores_of,
    shake,
    train,
)
from tiny_models import EOS, PAD, counting_calls, first_layer, make_prompts
from tiny_seq2seq import episodes

from algorithms import adapters
from algorithms.lora import TRAINED, adapter_weights, lora_layers
from algorithms.models import load_language_model, load_reference, parameter_groups
from algorithms.sampling import SamplingSpec, sample_responses

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
STARTS = pytest.mark.parametrize("start", ["fresh", "warm"])
VALUE_MODELS = ["separate", "shared", "none"]
# Inputs and outputs of the adapted layers, of all of them together: r · (in + out) trained weights each
WIDTHS = {"gpt2": 2 * (32 + 96), "llama": 2 * (32 + 32 + 32 + 16), "t5": 2 * 6 * (32 + 32)}


@pytest.fixture
def base(family: str, tmp_path: Path) -> str:
    return save_base(family, tmp_path / "base")


@pytest.fixture
def model_name(family: str, base: str, start: str, tmp_path: Path) -> str:
    """A base to which a fresh adapter is added, or the folder of an adapter to train on."""
    return base if start == "fresh" else save_adapter(family, base, tmp_path / "adapter")


def same_scores(one: Any, other: Any, *, exact: bool = True) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("logprobs", "entropy", "raw_logprobs")]
    return all(torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-4) for a, b in pairs)


@pytest.mark.parametrize("value_model", VALUE_MODELS)
@EVERY_FAMILY
def test_adapters_and_value_head_are_trained_and_nothing_else(base: str, family: str, value_model: str) -> None:
    model = load(family, base, lora(), value_model=value_model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adapted = {name for name in trained if ".lora_A." in name or ".lora_B." in name}
    of_policy = sum(trained[name].numel() for name in adapted if name.startswith("policy."))
    of_critic = sum(trained[name].numel() for name in adapted if name.startswith("critic."))
    assert of_policy == 4 * WIDTHS[family] and of_critic == (of_policy if value_model == "separate" else 0)
    assert trained.keys() - adapted == (set() if value_model == "none" else {"value_head.weight"})
    groups = parameter_groups(model, learning_rate=1e-3, critic_learning_rate=2e-3, weight_decay=0.1)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in trained.values()}
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("value_model", VALUE_MODELS)
@EVERY_FAMILY
def test_every_adapter_gets_a_gradient(base: str, family: str, value_model: str) -> None:
    model = load(family, base, lora(), value_model=value_model)
    shake(model)
    loss_of(model).backward()
    weak = {
        name for name, p in model.named_parameters() if p.requires_grad and not (p.grad is not None and p.grad.any())
    }
    assert not weak


@STARTS
@EVERY_FAMILY
def test_training_changes_the_policy_and_neither_base_nor_reference(family: str, base: str, model_name: str) -> None:
    model = load(family, model_name, lora())
    reference, start = adapters.reference_of(model.policy), scores_of(model)
    frozen = frozen_weights(model)
    assert same_scores(scores_of(reference), start), "the KL is exactly 0 at the start"
    plain = scores_of(load_language_model(base, **kind(family)))
    # T5's attention takes another kernel where the bias has no gradient.
    assert same_scores(start, plain, exact=family != "t5") is (model_name == base)
    assert torch.equal(model(**episodes()).logprobs, start.logprobs), "PPO's first ratio is exactly 1"
    train(model)
    assert not same_scores(scores_of(model), start, exact=False)
    assert same_scores(scores_of(reference), start)
    assert frozen and all(torch.equal(model.get_parameter(name), value) for name, value in frozen.items())


@STARTS
@EVERY_FAMILY
def test_a_resumed_run_has_the_same_policy_and_the_same_reference(family: str, model_name: str) -> None:
    first = load(family, model_name, lora())
    start = scores_of(first)
    train(first)
    state = {name: value.clone() for name, value in adapters.trainable_state(first).items()}
    again = load(family, model_name, lora())
    adapters.load_trainable_state(again, state)
    assert same_scores(scores_of(again), scores_of(first)) and not same_scores(scores_of(again), start)
    assert torch.equal(scores_of(again).values, scores_of(first).values)
    assert same_scores(scores_of(adapters.reference_of(again.policy)), start)


@STARTS
@pytest.mark.parametrize("family", ["gpt2"])
def test_the_reference_leaves_everything_as_it_was(
    family: str, model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(family, model_name, lora()).train()
    shake(model)
    next(iter(adapter_weights(model.policy).values())).requires_grad_(False)  # as someone may want it
    reference, flags = adapters.reference_of(model.policy), [p.requires_grad for p in model.parameters()]
    before, result = scores_of(model), reference(**episodes())
    assert not result.logprobs.requires_grad and not same_scores(scores_of(reference), before)

    def check() -> None:
        assert same_scores(scores_of(model), before)
        assert [p.requires_grad for p in model.parameters()] == flags
        assert all(module.training for module in model.modules())
        assert all(layer.active_adapters == [TRAINED] for layer in lora_layers(model).values())

    check()
    monkeypatch.setattr(model.policy, "chunk_rows", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        reference(**episodes())
    monkeypatch.undo()
    check()


@STARTS
@EVERY_FAMILY
def test_recomputation_takes_the_trained_adapter_again(family: str, model_name: str) -> None:
    options = {"dtype": torch.float64 if family == "t5" else torch.float32}
    plain, saving = (load(family, model_name, lora(), gradient_checkpointing=on, **options) for on in (False, True))
    found = []
    for model in (plain, saving):
        shake(model)
        with (
            model.recomputing(model is saving),
            counting_calls(next(iter(lora_layers(model.policy).values())).base_layer) as calls,
        ):
            loss = loss_of(model)
            adapters.reference_of(model.policy)(**episodes())
            loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert len(calls) == 3, "forward, reference, recomputation"
    # T5's encoder adds up its gradients in another order: rounding, which float64 takes away.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-11 if family == "t5" else 0)


@pytest.mark.parametrize("family", [*FAMILIES, "opt", "bart"])
def test_the_critic_starts_as_the_policy_and_is_its_own(base: str, family: str, tmp_path: Path) -> None:
    adapter = save_adapter(family, base, tmp_path / "adapter")
    for model in (load(family, adapter, lora()), load(family, adapter)):
        policy, critic = ({n: p for n, p in m.named_parameters()} for m in (model.policy.lm, model.critic))
        prefix = f"{model.policy.lm.base_model_prefix}."
        shared = {name.removeprefix(prefix): p for name, p in policy.items()}
        assert all(torch.equal(p, shared[name]) and p is not shared[name] for name, p in critic.items())
        assert len(lora_layers(model.critic)) == len(lora_layers(model.policy))
    plain = load(family, base).critic.state_dict()
    assert any(not torch.equal(value, plain[name]) for name, value in model.critic.state_dict().items()), "merged"


@EVERY_FAMILY
def test_sampling_and_scoring_use_the_adapter(base: str, family: str, tmp_path: Path) -> None:
    model = load(family, save_adapter(family, base, tmp_path / "adapter"), lora())
    prompt_ids, prompt_mask = make_prompts([6, 2, 4, 1])
    uniforms = torch.rand(4, 8, generator=torch.Generator().manual_seed(4))
    spec = SamplingSpec(max_new_tokens=8)
    adapters.save_merged(model.policy, tmp_path / "merged")
    merged, plain = (load_language_model(str(path), **kind(family)) for path in (tmp_path / "merged", base))
    got, expected, without = (
        sample_responses(
            policy, prompt_ids, prompt_mask, uniforms, spec, eos_token_ids=[EOS], stop_on_eos=False, pad_token_id=PAD
        ).ids
        for policy in (model.policy, merged, plain)
    )
    assert torch.equal(got, expected) and not torch.equal(got, without)
    assert same_scores(scores_of(model), scores_of(merged), exact=False)


@EVERY_FAMILY
def test_the_layers_run_once_and_the_head_on_counted_positions(base: str, family: str) -> None:
    model = load(family, base, lora(target_modules="all-linear"))
    assert model.policy.head == load_language_model(base, **kind(family)).head is not None
    inputs = episodes()
    with (
        counting_calls(first_layer(model.policy.lm)) as layer,
        counting_calls(model.policy.lm.get_output_embeddings()) as head,
    ):
        model(**inputs)
    assert len(layer) == 1 and sum(shape[0] for shape in head) == int(inputs["response_mask"].sum())


@pytest.mark.parametrize("family", ["gpt2"])
def test_adapters_of_a_half_precision_base_are_float32(base: str) -> None:
    model = load("gpt2", base, lora(), dtype=torch.bfloat16)
    dtypes = {".lora_" in name: p.dtype for name, p in model.named_parameters() if "value_head" not in name}
    assert model.value_head is not None and model.value_head.weight.dtype == torch.float32
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    start = scores_of(model)
    assert same_scores(start, scores_of(load_reference(base, dtype=torch.bfloat16)))
    train(model)
    assert not same_scores(scores_of(model), start)
    assert same_scores(scores_of(adapters.reference_of(model.policy)), start)


@pytest.mark.parametrize("family", ["gpt2"])
def test_a_policy_without_adapter_has_no_reference_inside(base: str) -> None:
    with pytest.raises(ValueError, match="load_reference"):
        adapters.reference_of(load_language_model(base))
