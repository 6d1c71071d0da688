"""Plans for GPUs that are not there, and maps that are written by hand."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
)

from train.device_maps import DeviceMap, budgets, describe, device_of, plan, state_bytes, tensors_of, weight_bytes

GB = 10**9
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(n_embd=1024, n_layer=24, n_head=16),
    "llama": LlamaConfig(hidden_size=2048, intermediate_size=5504, num_hidden_layers=16, vocab_size=32000),
    "t5": T5Config(d_model=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12),
    "bart": BartConfig(d_model=1024, encoder_layers=12, decoder_layers=12),
}


def on_meta(
    family: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """Policy, critic and frozen reference of a real size, which hold nothing."""
    config = CONFIGS[family]
    lm = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        models = (lm.from_config(config), AutoModel.from_config(config), lm.from_config(config))
    models[2].requires_grad_(False)
    return tuple(model.to(dtype) for model in models)  # type: ignore[return-value]


def spent(models: dict[str, PreTrainedModel], maps: dict[str, DeviceMap], n_gpus: int) -> list[list[int]]:
    """Bytes of weights, gradients and moments, by model and GPU."""
    table = []
    for name, model in models.items():
        row, seen = [0] * n_gpus, set()
        for tensor, x in tensors_of(model).items():
            if id(x) not in seen:
                seen.add(id(x))
                row[device_of(tensor, maps[name])] += x.nbytes * (4 if x.requires_grad else 1)
        table.append(row)
    return table


def whole_blocks(model: PreTrainedModel, device_map: DeviceMap) -> bool:
    blocks = [name for name, m in model.named_modules() if type(m).__name__ in model._no_split_modules]
    return all(
        len({device_of(f"{b}.{t}", device_map) for t in tensors_of(model.get_submodule(b))}) == 1 for b in blocks
    )


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("how", ["balanced", "sequential"])
def test_all_models_share_the_gpus(family: str, how: str) -> None:
    policy, critic, reference = on_meta(family)
    models = {"policy": policy, "critic": critic, "reference": reference}
    total = sum(map(state_bytes, models.values()))
    assert total == pytest.approx(4 * weight_bytes(policy) + 4 * weight_bytes(critic) + weight_bytes(policy), rel=0.01)
    capacity = [int(total * share) for share in (0.4, 0.3, 0.5, 0.5)]
    maps = plan(how, policy, {"critic": critic, "reference": reference}, capacity)
    table = spent(models, maps, 4)
    used = [sum(column) for column in zip(*table, strict=True)]
    assert sum(used) == total and all(a <= b for a, b in zip(used, capacity, strict=True)), used
    for (name, model), row in zip(models.items(), table, strict=True):
        assert whole_blocks(model, maps[name])
        tied = policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
        if how == "balanced":
            assert max(row) < 0.45 * sum(row) and min(row) > 0.05 * sum(row), row
        elif not tied or family == "gpt2":
            assert row[0] > 0.25 * sum(row) and row[3] < 0.1 * sum(row), row
    assert describe(maps, models, 4)[0].startswith(f"device map of the policy: GPU 0: {table[0][0] / 2**30:.2f} GiB, ")


@pytest.mark.parametrize("family", CONFIGS)
def test_tied_weights_are_in_one_place(family: str) -> None:
    policy, critic, _ = on_meta(family, torch.bfloat16)
    room = [int(0.8 * (state_bytes(policy) + state_bytes(critic)))] * 2
    for name, device_map in plan("auto", policy, {"critic": critic}, room).items():
        places: dict[int, set[int]] = {}
        for tensor, x in tensors_of({"policy": policy, "critic": critic}[name]).items():
            places.setdefault(id(x), set()).add(device_of(tensor, device_map))
        assert all(len(devices) == 1 for devices in places.values())
        assert {device for devices in places.values() for device in devices} == {0, 1}


def test_models_that_do_not_fit_are_refused_with_what_they_need() -> None:
    policy, critic, reference = on_meta("gpt2")
    others = {"critic": critic, "reference": reference}
    needs = state_bytes(policy) / 2**30
    for capacity in ([3 * GB, 3 * GB], [7 * GB, 7 * GB // 10]):  # in all, and at whole blocks
        with pytest.raises(
            ValueError, match=rf"do not fit .* policy {needs:.3g}, critic .*, reference .* reference_device"
        ):
            plan("balanced", policy, others, capacity)
    policy.requires_grad_(False)  # an adapter's base
    assert plan("balanced", policy, {}, [GB, GB])


BY_HAND: dict[str, dict[str, Any]] = {
    "gpt2": {
        "transformer.wte": 0,
        "transformer.wpe": 0,
        **{f"transformer.h.{i}": int(i > 9) for i in range(24)},
        "transformer.ln_f": 1,
        "lm_head": "0",
    },
    "llama": {"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1, "lm_head": 1},
    "t5": {"shared": 1, "encoder": 1, "decoder": 1, "lm_head": 1},
    "bart": {"": 1},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_map_by_hand_is_of_the_policys_modules_and_serves_every_model(family: str) -> None:
    policy, critic, reference = on_meta(family)
    maps = plan(BY_HAND[family], policy, {"critic": critic, "reference": reference}, [0, 0])
    given = {name: int(device) for name, device in BY_HAND[family].items()}
    assert maps["reference"] == maps["policy"] and "" not in maps["policy"]
    assert all(device_of(name, maps["policy"]) == device_of(name, given) for name in tensors_of(policy))
    on_critic = {name: device_of(name, maps["critic"]) for name in tensors_of(critic)}
    prefix = "" if family == "t5" else f"{policy.base_model_prefix}."
    assert on_critic == {name: device_of(prefix + name, given) for name in on_critic}
    assert set(on_critic.values()) <= {0, 1} and 1 in on_critic.values()


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"transformer.hh.0": 0}, r"unknown module 'transformer.hh.0'; did you mean 'transformer.h.0'\?"),
    ("gpt2", {"": 2}, "2 is no GPU of a process, which has 2: 0 to 1"),
    ("gpt2", {"": "cuda:0"}, "'cuda:0' is no GPU of a process"),
    ("gpt2", {"transformer": 0, "lm_head": "cpu"}, "lm_head: 'cpu' .* weights that are trained cannot lie there"),
    ("gpt2", {"transformer": 0, "lm_head": "disk"}, "lm_head: 'disk' .* weights that are trained cannot lie there"),
    ("gpt2", {"transformer": 0, "lm_head": 1}, "are one weight: give them the same GPU"),
    ("gpt2", {"": 0, "transformer.h.3.mlp": 1}, r"transformer.h.3 is one block, and its parts need the same GPU"),
    ("gpt2", {"transformer.h": 0}, "says nothing of transformer.wte, transformer.wpe, transformer.ln_f, lm_head"),
    ("llama", {"model.layers": 0}, "says nothing of model.embed_tokens, model.norm, lm_head:"),
]


@pytest.mark.parametrize(("family", "given", "fault"), WRONG)
def test_a_map_by_hand_that_is_wrong(family: str, given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"^alg.policy.args.device_map.*{fault}"):
        plan(given, on_meta(family)[0], {}, [0, 0])


def test_budgets_of_memory() -> None:
    assert budgets({"0": "10GiB", "2": 5}, 3) == [10 * 2**30, 0, 5]
    for given, fault in (
        ({"3": 1}, "'3' is no GPU"),
        ({"cpu": 1}, "'cpu' is no GPU"),
        ({"0": "much"}, "'much' is no size"),
    ):
        with pytest.raises(ValueError, match=f"max_memory: {fault}"):
            budgets(given, 3)


def test_a_gpu_that_has_no_budget_is_not_used() -> None:
    policy = on_meta("llama")[0]
    room = [0, int(0.7 * state_bytes(policy)), int(0.7 * state_bytes(policy))]
    device_map = plan("balanced", policy, {}, room)["policy"]
    assert isinstance(policy, nn.Module) and set(device_map.values()) == {1, 2}
