"""Models spread over devices: the hooks change no bit, and every tensor is where it is needed.

There is no second device here. The first is checked with the hooks of a real dispatch, all devices being the CPU; the
second with tensors that have a device and no values, which refuse to meet one on another device.
"""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModel

sys.path.append(str(Path(__file__).parents[1] / "algorithms"))
from tiny_adapters import lora, shake
from tiny_models import EOS, PAD, make_lm
from tiny_seq2seq import episodes, make_seq2seq

from algorithms import adapters
from algorithms.decoding import Decoding
from algorithms.models import parameter_groups
from algorithms.policy import ActorCritic, LanguageModel
from algorithms.sampling import SamplingSpec, sample_responses
from algorithms.trpo import fisher_vector_product, kl_here, measure, restricted_logits
from algorithms.trust_region import assign, flatten, split_like, trainable
from train.device_maps import DeviceMap, device_of, plan
from train.placement import dispatch, is_spread

_LLAMA = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 0}
_T5 = {"shared": 0, "lm_head": 0, "encoder.embed_tokens": 0, "encoder.block.0": 0, "encoder.block.1": 1}
MAPS: dict[str, dict[str, int]] = {
    "gpt2": {"transformer": 0, "transformer.h.1": 1, "transformer.ln_f": 1, "lm_head": 0},
    "llama": {**_LLAMA, "model.embed_tokens": 1, "lm_head": 1},  # the first weight is not on the first GPU
    "gemma2": _LLAMA,  # its logits come from its own forward
    "t5": {**_T5, "encoder.final_layer_norm": 1, "decoder": 1, "decoder.embed_tokens": 0, "decoder.block.0": 0},
    "bart": {"model": 0, "model.encoder.layers.1": 1, "model.decoder.layers.1": 1, "lm_head": 0},
}
FAMILIES = list(MAPS)


def actor_critic(family: str, value_model: str = "separate", adapter: bool = False) -> ActorCritic:
    """Policy and critic of two layers, with a value head that says something."""
    make = make_seq2seq if family in ("t5", "bart") else make_lm
    lm = make(family)
    if adapter:
        adapters.attach(lm, "nothing", lora(target_modules="all-linear"))
        shake(lm)
    critic = AutoModel.from_config(lm.config).eval() if value_model == "separate" else None
    model = ActorCritic(LanguageModel(lm), critic)
    nn.init.normal_(model.value_head.weight, std=0.3)
    return model.eval()


def maps_of(model: ActorCritic) -> dict[str, DeviceMap]:
    """Of policy and critic, written by hand."""
    others = {} if model.critic is None else {"critic": model.critic}
    return plan(MAPS[model.policy.lm.config.model_type], model.policy.lm, others, [0, 0])


def parts(model: ActorCritic) -> dict[str, Any]:
    return {"policy": model.policy.lm} | ({} if model.critic is None else {"critic": model.critic})


def spread_on_cpu(model: ActorCritic) -> None:
    for name, device_map in maps_of(model).items():
        places = dict.fromkeys(device_map, torch.device("cpu"))
        dispatch(parts(model)[name], places, torch.device("cpu"), force_hooks=True)


def loss_of(model: ActorCritic, inputs: dict[str, Any]) -> Tensor:
    scores = model(**inputs, unrestricted=True)
    return scores.logprobs.sum() + scores.raw_logprobs.sum() + scores.entropy.sum() + scores.values.square().sum()


def train_step(model: ActorCritic) -> list[float]:
    rates = {"learning_rate": 0.01, "critic_learning_rate": 0.02, "weight_decay": 0.1}
    optimizer, losses = torch.optim.AdamW(parameter_groups(model, **rates)), []
    for _ in range(2):
        loss = loss_of(model, episodes(restricted=True))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def sampled(model: ActorCritic) -> Tensor:
    inputs = episodes()
    uniforms = torch.rand(4, 12, generator=torch.Generator().manual_seed(2))
    stop = list(range(EOS, 16))  # some rows end early, and are dropped
    kwargs = {"eos_token_ids": stop, "stop_on_eos": True, "pad_token_id": PAD}
    spec = SamplingSpec(max_new_tokens=12, temperature=2.0)
    found = sample_responses(model.policy, inputs["prompt_ids"], inputs["prompt_mask"], uniforms, spec, **kwargs)
    assert len(set(found.lengths.tolist())) > 1
    return found.ids


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_change_no_bit(family: str, tmp_path: Path) -> None:
    plain = actor_critic(family)
    spread = copy.deepcopy(plain)
    spread_on_cpu(spread)
    assert is_spread(spread) and not is_spread(plain)
    hooked = [name for name, module in spread.named_modules() if hasattr(module, "_hf_hook")]
    assert len(hooked) > 12 and not any(hasattr(module, "hf_device_map") for module in spread.modules())
    assert torch.equal(sampled(spread), sampled(plain))
    inputs = {"input_ids": episodes()["prompt_ids"], "attention_mask": episodes()["prompt_mask"]}
    beams = [model.policy.lm.generate(**inputs, num_beams=3, max_new_tokens=6) for model in (spread, plain)]
    assert torch.equal(*beams)
    assert train_step(spread) == train_step(plain)
    ours, theirs = (adapters.trainable_state(model) for model in (spread, plain))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    spread.policy.save_pretrained(tmp_path)
    again = type(plain.policy.lm).from_pretrained(tmp_path).eval()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.policy.lm.parameters(), strict=True))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_hooks_change_no_bit_of_an_adapter(family: str) -> None:
    plain = actor_critic(family, adapter=True, value_model="shared")
    spread = copy.deepcopy(plain)
    spread_on_cpu(spread)
    assert train_step(spread) == train_step(plain)
    inputs = {name: value for name, value in episodes().items() if name not in ("action_mask", "temperature")}
    ours, theirs = (adapters.reference_of(model.policy)(**inputs) for model in (spread, plain))
    assert torch.equal(ours.logprobs, theirs.logprobs)
    assert not torch.equal(ours.logprobs, spread.policy(**inputs).logprobs)


class Strict(TorchDispatchMode):
    """All that meets lies on one device, as GPUs want it: numbers and indices too, unless they are on the CPU itself.

    Whatever is asked for as a Python number is true.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True
        if func not in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            found = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)} - {torch.device("cpu")}
            assert len(found) < 2, f"{func} of tensors on {found}"
        return func(*args, **(kwargs or {}))


MAIN, OTHER = torch.device("cpu", 1), torch.device("cpu", 2)


def put(model: nn.Module, device_map: DeviceMap, mode: FakeTensorMode) -> None:
    """Tensors without values on the map's devices, in the place of the model's own."""
    made: dict[int, Tensor] = {}
    for name, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for key, x in own.items():
                if x is not None and id(x) not in made:
                    device = (MAIN, OTHER)[device_of(f"{name}.{key}".lstrip("."), device_map)]
                    with mode:
                        blank = torch.empty(x.shape, dtype=x.dtype, device=device)
                        made[id(x)] = nn.Parameter(blank, x.requires_grad) if isinstance(x, nn.Parameter) else blank
                if x is not None:
                    own[key] = made[id(x)]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Devices cpu:1 and cpu:2, whose tensors do not meet."""
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: id(self))
    made = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:  # torch's forgets the number of a device cpu:n
        value = made(*args, **kwargs)
        fake = device in (MAIN, OTHER)
        return torch.empty(value.shape, dtype=value.dtype, device=device) if fake else value

    monkeypatch.setattr(torch, "tensor", tensor)
    # Which tokens count is a value; there are none.
    monkeypatch.setattr(
        Tensor, "nonzero", lambda x, as_tuple: tuple(x.new_zeros(3, dtype=torch.int64) for _ in x.shape)
    )
    yield FakeTensorMode()


def fake(model: ActorCritic, mode: FakeTensorMode) -> dict[str, Any]:
    """Spreads the model over the two devices; the arguments of its forward, on the first."""
    for name, device_map in maps_of(model).items():
        put(parts(model)[name], device_map, mode)
        with mode:
            dispatch(parts(model)[name], {key: (MAIN, OTHER)[gpu] for key, gpu in device_map.items()}, MAIN)
    put(model.value_head, {"": 0}, mode)
    inputs = episodes(restricted=True)
    with mode:
        return {
            name: x if not isinstance(x, Tensor) else torch.empty(x.shape, dtype=x.dtype, device=MAIN)
            for name, x in inputs.items()
        }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value_model", ["separate", "shared"])
def test_every_tensor_is_where_it_is_needed(family: str, value_model: str, devices: FakeTensorMode) -> None:
    model = actor_critic(family, value_model)
    inputs = fake(model, devices)
    assert {p.device for p in model.parameters()} == {MAIN, OTHER}
    with devices, Strict():
        loss = loss_of(model, inputs)
        assert loss.device == MAIN
        loss.backward()
        assert all(p.grad.device == p.device for p in model.parameters() if p.grad is not None)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.optim.AdamW(model.parameters()).step()
        with torch.no_grad():
            decoding = Decoding(model.policy, inputs["prompt_ids"], inputs["prompt_mask"], 5)
            assert decoding.advance().device == MAIN
            token = torch.zeros(4, dtype=torch.int64, device=MAIN)
            decoding.advance(token)
            decoding.keep(torch.zeros(3, dtype=torch.int64, device=MAIN))
            assert decoding.advance(token[:3]).device == MAIN
    caches = [decoding.cache.self_attention_cache if decoding.is_seq2seq else decoding.cache]
    assert {layer.keys.device for cache in caches for layer in cache.layers} == {MAIN, OTHER}


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_the_numbers_of_trpos_step_are_where_they_are_needed(family: str, devices: FakeTensorMode) -> None:
    policy = (model := actor_critic(family)).policy
    inputs = fake(model, devices)
    params = trainable(policy)

    def logits(given: Any) -> Tensor:
        return restricted_logits(policy, **given)

    with devices, Strict():
        vector = flatten(params)
        place = params[0].device
        assert vector.device == place and [x.device for x in split_like(vector, params)] == [p.device for p in params]
        assign(params, vector)
        product = fisher_vector_product(lambda x: kl_here(logits(x)), vector, params, [inputs], 1.0, lambda x: x)
        assert product.device == place and product.shape == vector.shape
        objective = measure(vector, vector, params, [inputs], lambda x: logits(x).sum(), logits)
        assert objective.device == place


def test_the_check_would_find_a_tensor_on_another_device(devices: FakeTensorMode) -> None:
    with devices, Strict():
        here, there = torch.zeros(3, device=MAIN), torch.zeros(3, device=OTHER)
        for meet in (lambda: here + there, lambda: here.sum() + there.sum(), lambda: here[there.long()]):
            with pytest.raises(AssertionError, match="of tensors on"):
                meet()
        assert (here + there.to(MAIN)).device == MAIN
