"""Adapters on disk: what peft and transformers read, what is merged, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from tiny_adapters import FAMILIES, kind, load, lora, save_adapter, save_base, scores_of, shake
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from algorithms import adapters
from algorithms.lora import lora_layers
from algorithms.models import load_actor_critic, load_language_model, load_reference
from algorithms.policy import LanguageModel

# What peft says when it is used directly, without what is set for it here
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
# The adapter's product is added to the weight in one place and to the layer's output in the other
MERGED = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def family() -> str:
    """The one that tests use which are not about families."""
    return "gpt2"


@pytest.fixture
def base(family: str, tmp_path: Path) -> str:
    return save_base(family, tmp_path / "base", **({"attn_pdrop": 0.5} if family == "gpt2" else {}))


@pytest.fixture
def adapter(family: str, base: str, tmp_path: Path) -> str:
    return save_adapter(family, base, tmp_path / "adapter")


def auto(family: str) -> Any:
    return AutoModelForSeq2SeqLM if kind(family)["seq2seq"] else AutoModelForCausalLM


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one.raw_logprobs, other.raw_logprobs, **MERGED)


@EVERY_FAMILY
def test_peft_reads_what_is_written(base: str, adapter: str, family: str) -> None:
    policy = load_language_model(adapter, lora=lora(), **kind(family))
    theirs = PeftModel.from_pretrained(auto(family).from_pretrained(base), adapter)
    got = scores_of(LanguageModel(theirs.get_base_model().eval()))
    assert torch.equal(got.raw_logprobs, scores_of(policy).raw_logprobs)
    assert {path.name for path in Path(adapter).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(Path(base).resolve()) and config["inference_mode"]
    assert config["task_type"] == ("SEQ_2_SEQ_LM" if kind(family)["seq2seq"] else "CAUSAL_LM")


@EVERY_FAMILY
def test_what_peft_writes_is_read(base: str, family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    options = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.5, "init_lora_weights": "gaussian"}
    theirs = get_peft_model(auto(family).from_pretrained(base), LoraConfig(**options))
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(family, str(tmp_path / "theirs"), lora(r=3, alpha=6)).train()
    theirs.eval()
    expected = scores_of(LanguageModel(theirs.get_base_model()))
    assert torch.equal(scores_of(model).raw_logprobs, expected.raw_logprobs), "and there is no dropout"


def test_an_adapter_finds_its_base_from_another_folder(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = save_adapter("gpt2", "base", tmp_path / "adapter")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Path(adapters.base_of(adapter)) == Path(base) and lora_layers(load_language_model("../adapter", lora=lora()))


@EVERY_FAMILY
def test_a_warm_start_is_written_as_an_adapter_of_the_same_base(
    adapter: str, base: str, family: str, tmp_path: Path
) -> None:
    policy = load_language_model(adapter, lora=lora(), **kind(family))
    shake(policy)
    adapters.save_pretrained(policy, tmp_path / "second")
    again = load_language_model(str(tmp_path / "second"), lora=lora(), **kind(family))
    assert torch.equal(scores_of(again).logprobs, scores_of(policy).logprobs)
    assert adapters.base_of(str(tmp_path / "second")) == base


@pytest.mark.parametrize("target_modules", [None, "all-linear"])
@EVERY_FAMILY
def test_a_merged_model_is_an_ordinary_one(base: str, family: str, target_modules: Any, tmp_path: Path) -> None:
    policy = load_language_model(base, lora=lora(target_modules=target_modules), **kind(family))
    shake(policy)
    config, before = policy.lm.config, {name: value.clone() for name, value in policy.state_dict().items()}
    adapters.save_merged(policy, tmp_path / "merged")
    after = policy.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in after)
    assert policy.lm.config is config
    merged, info = auto(family).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), "nothing missing, nothing unknown"
    close(scores_of(LanguageModel(merged.eval())), scores_of(policy))
    saved, original = (AutoConfig.from_pretrained(path).to_dict() for path in (tmp_path / "merged", base))
    assert {**saved, "_name_or_path": ""} == {**original, "_name_or_path": ""}, "its dropout too"


@EVERY_FAMILY
def test_without_lora_an_adapter_is_merged_and_everything_is_trained(adapter: str, family: str, tmp_path: Path) -> None:
    with_adapter = load(family, adapter, lora())
    model, reference = load(family, adapter), load_reference(adapter, **kind(family))
    assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())
    close(scores_of(model), scores_of(with_adapter))
    torch.testing.assert_close(scores_of(model).values, scores_of(with_adapter).values, **MERGED)
    assert torch.equal(scores_of(reference).logprobs, scores_of(model).logprobs)
    assert not any(p.requires_grad for p in reference.parameters())
    adapters.save_pretrained(model.policy, tmp_path / "whole")
    again = load_language_model(str(tmp_path / "whole"), **kind(family))
    assert torch.equal(scores_of(again).logprobs, scores_of(model).logprobs)


def test_saving_takes_weights_that_were_gathered_elsewhere(adapter: str, tmp_path: Path) -> None:
    policy = load_language_model(adapter, lora=lora())
    expected, state = scores_of(policy), {name: value.clone() for name, value in policy.lm.state_dict().items()}
    with torch.no_grad():
        for weight in policy.parameters():
            weight.zero_()
    adapters.save_pretrained(policy, tmp_path / "again", state)
    adapters.save_merged(policy, tmp_path / "merged", state)
    got = scores_of(load_language_model(str(tmp_path / "again"), lora=lora()))
    assert torch.equal(got.logprobs, expected.logprobs)
    close(scores_of(load_language_model(str(tmp_path / "merged"))), expected)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        (lora(r=8), r"lora\.r is 8, but .* with 4: set it to 4"),
        (lora(alpha=4), r"lora\.alpha is 4, but .* with 8"),
        (lora(target_modules="all-linear"), r"lora\.target_modules are not those of the adapter"),
    ],
)
def test_settings_have_to_be_those_of_the_adapter(adapter: str, spec: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        load_language_model(adapter, lora=spec)


def test_the_same_target_modules_in_other_words_are_fine(adapter: str) -> None:
    assert lora_layers(load_language_model(adapter, lora=lora(target_modules=["attn.c_attn"])))


def edit(adapter: str, **changes: Any) -> None:
    path = Path(adapter) / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"base_model_name_or_path": "/no/such/folder"},
            "adapter of /no/such/folder, and there is no such folder: correct",
        ),
        ({"base_model_name_or_path": "no-such-model"}, "adapter of no-such-model, which cannot be loaded"),
        ({"base_model_name_or_path": None}, "does not say which model it belongs to"),
        ({"use_dora": True}, "with use_dora, not available here"),
        ({"modules_to_save": ["wte"]}, "with modules_to_save, not"),
        ({"init_lora_weights": "pissa"}, "with init_lora_weights, not"),
        ({"r": 2}, "does not fit its base: 4 of another shape"),
        ({"target_modules": ["c_attn", "c_fc"]}, "does not fit its base: 4 missing"),
        ({"target_modules": ["c_fc"]}, "4 missing, .* 4 unknown"),
    ],
)
@pytest.mark.parametrize("spec", [None, lora()])
def test_adapters_that_cannot_be_used_are_refused(adapter: str, changes: dict[str, Any], fault: str, spec: Any) -> None:
    edit(adapter, **changes)
    with pytest.raises(ValueError, match=fault):
        load_actor_critic(adapter, lora=spec)


def test_an_adapter_without_weights_is_refused(adapter: str) -> None:
    (Path(adapter) / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"without adapter_model\.safetensors"):
        load_language_model(adapter)


def test_other_kinds_of_adapters_are_refused(base: str, tmp_path: Path) -> None:
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), IA3Config(feedforward_modules=[]))
    theirs.save_pretrained(tmp_path / "ia3")
    with pytest.raises(ValueError, match="adapter of type IA3; only LoRA"):
        load_language_model(str(tmp_path / "ia3"))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_adapters_of_the_head_are_refused(base: str, tmp_path: Path) -> None:
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["c_attn", "lm_head"])
    )
    theirs.save_pretrained(tmp_path / "head", save_embedding_layers=False)
    with pytest.raises(ValueError, match="adapter with a part for the head"):
        load_language_model(str(tmp_path / "head"))


@pytest.mark.parametrize(("family", "fix"), [("gpt2", "causal_lm"), ("t5", "seq2seq_lm")])
def test_a_model_of_the_other_kind_is_refused(base: str, adapter: str, family: str, fix: str) -> None:
    wrong = {"seq2seq": not kind(family)["seq2seq"]}
    for name, spec in ((base, None), (base, lora()), (adapter, None), (adapter, lora())):
        with pytest.raises(ValueError, match=rf"alg\.policy\.id: .* set alg\.policy\.id to {fix}_actor_critic_policy"):
            load_actor_critic(name, lora=spec, **wrong)
