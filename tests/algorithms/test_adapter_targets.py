"""Which layers get adapters, and with what weights they start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import kind, lora, save_base
from tiny_models import make_lm
from transformers import GraniteConfig, GraniteForCausalLM

from algorithms.adapters import attach
from algorithms.lora import lora_layers, target_names
from algorithms.models import load_language_model


@pytest.fixture
def base(family: str, tmp_path: Path) -> str:
    return save_base(family, tmp_path / "base")


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_fresh_adapter_depends_on_the_seed_alone(base: str, family: str) -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        policy = load_language_model(base, lora=lora(), **kind(family))
        found.append([p for name, p in policy.named_parameters() if ".lora_A." in name])
    equal = [[torch.equal(a, b) for a, b in zip(found[0], other, strict=True)] for other in found[1:]]
    assert all(equal[0]) and not any(equal[1])


@pytest.mark.parametrize("training", [True, False])
def test_new_layers_are_in_the_mode_of_the_model(training: bool) -> None:
    lm = make_lm("gpt2").train(training)
    attach(lm, "gpt2", lora())
    assert lora_layers(lm) and {module.training for module in lm.modules()} == {training}


@pytest.mark.parametrize(
    ("family", "wanted", "ends"),
    [
        ("gpt2", None, {"c_attn"}),
        ("llama", "all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("llama", ("self_attn.o_proj", "q_proj"), {"o_proj", "q_proj"}),
        ("t5", ["DenseReluDense.wi"], {"wi"}),
    ],
)
def test_target_modules(base: str, family: str, wanted: Any, ends: set[str]) -> None:
    policy = load_language_model(base, lora=lora(target_modules=wanted), **kind(family))
    names = lora_layers(policy.lm).keys()
    assert {name.rpartition(".")[2] for name in names} == ends
    plain = load_language_model(base, **kind(family)).lm
    assert names == set(target_names(plain, wanted)) and len(names) >= 2 * len(ends), "in every layer"


@pytest.mark.parametrize("family", ["gpt2"])
def test_target_modules_that_do_not_exist_are_named_with_those_that_do(base: str) -> None:
    with pytest.raises(ValueError, match=r"no layer of gpt2 has the name q_proj; .*: c_attn, c_fc, c_proj$"):
        load_language_model(base, lora=lora(target_modules=["c_attn", "q_proj"]))
    with pytest.raises(ValueError, match="no layer of gpt2 has the name lm_head"):
        load_language_model(base, lora=lora(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"lora\.target_modules: .*c_attn, c_fc, c_proj$"):
        load_language_model(base, lora=lora(target_modules=()))


def test_a_family_without_defaults_asks_for_names(tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'no default for models of type granite; .*"all-linear" or .*: down_proj, '):
        load_language_model(str(tmp_path), lora=lora())
    assert lora_layers(load_language_model(str(tmp_path), lora=lora(target_modules="all-linear")))
