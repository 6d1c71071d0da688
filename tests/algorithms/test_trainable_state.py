"""The weights that a checkpoint holds: those that are trained, whatever the model is."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import FAMILIES, load, lora, save_adapter, save_base, scores_of
from torch import nn

from algorithms import adapters
from algorithms.lora import adapter_weights
from algorithms.models import load_language_model


@pytest.fixture
def family() -> str:
    """The one that tests use which are not about families."""
    return "gpt2"


@pytest.fixture
def base(family: str, tmp_path: Path) -> str:
    return save_base(family, tmp_path / "base")


@pytest.fixture
def adapter(family: str, base: str, tmp_path: Path) -> str:
    return save_adapter(family, base, tmp_path / "adapter")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_holds_what_is_trained(base: str, adapter: str, family: str, tmp_path: Path) -> None:
    for name in (base, adapter):
        model = load(family, name, lora())
        state = adapters.trainable_state(model)
        assert state.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
        save_file(state, tmp_path / "state.safetensors")
        expected = scores_of(model)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.zero_()
        adapters.load_trainable_state(model, load_file(tmp_path / "state.safetensors"))
        got = scores_of(model)
        assert torch.equal(got.logprobs, expected.logprobs) and torch.equal(got.values, expected.values)


@pytest.mark.parametrize("family", [*FAMILIES, "bart"])
def test_a_checkpoint_of_a_model_without_adapters_is_whole(base: str, family: str, tmp_path: Path) -> None:
    model, other = load(family, base), load(family, base)
    with torch.no_grad():
        for tensor in (*other.parameters(), *(value for _, value in other.named_buffers())):
            tensor.mul_(0.5)
    save_file(adapters.trainable_state(model), tmp_path / "state.safetensors")
    adapters.load_trainable_state(other, load_file(tmp_path / "state.safetensors"))
    state = other.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_mask_policy_is_checkpointed_though_it_is_frozen(base: str) -> None:
    with_adapter = load_language_model(base, lora=lora()).requires_grad_(False)
    whole = load_language_model(base).requires_grad_(False)
    assert len(adapters.trainable_state(with_adapter)) == len(adapter_weights(with_adapter))
    assert adapters.trainable_state(whole).keys() == dict(whole.named_parameters()).keys()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(base: str) -> None:
    model, state = load("gpt2", base, lora()), adapters.trainable_state(load("gpt2", base, lora()))
    before = [p.clone() for p in model.parameters()]
    first = next(iter(state))
    cases = {
        "1 missing, as value_head.weight": {
            k: torch.ones_like(v) for k, v in state.items() if k != "value_head.weight"
        },
        "1 unknown, as extra": {**state, "extra": torch.zeros(1)},
        "1 of another shape": {**state, first: torch.zeros(1, 1)},
        "missing, .* unknown": adapters.trainable_state(nn.Linear(2, 2)),
    }
    for fault, wrong in cases.items():
        with pytest.raises(ValueError, match=f"do not fit ActorCritic: .*{fault}"):
            adapters.load_trainable_state(model, wrong)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
