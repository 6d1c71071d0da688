"""Every tensor is where it is needed, with two devices that are not there: tensors that have a device and no values,
and that refuse to meet one on another device."""

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

sys.path.append(str(Path(__file__).parent))
from placement_models import FAMILIES, actor_critic, loss_of, maps_of, parts
from tiny_seq2seq import episodes

from algorithms.decoding import Decoding
from algorithms.policy import ActorCritic
from algorithms.trpo import fisher_vector_product, kl_here, measure, restricted_logits
from algorithms.trust_region import assign, flatten, split_like, trainable
from train.device_maps import DeviceMap, device_of
from train.placement import dispatch


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


def fake(model: ActorCritic, mode: FakeTensorMode, given: dict[str, int] | None = None) -> dict[str, Any]:
    """Spreads the model over the two devices; the arguments of its forward, on the first."""
    for name, device_map in maps_of(model, given).items():
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


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_models_that_are_wholly_on_another_device_than_the_batches(family: str, devices: FakeTensorMode) -> None:
    model = actor_critic(family)
    inputs = fake(model, devices, {"": 1})
    assert {p.device for p in model.policy.parameters()} == {OTHER}
    with devices, Strict():
        loss_of(model, inputs).backward()
        assert Decoding(model.policy, inputs["prompt_ids"], inputs["prompt_mask"], 5).advance().device == MAIN


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
