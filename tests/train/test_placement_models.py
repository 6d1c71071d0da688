"""The hooks of spread models change no bit: those of a real dispatch, all devices being the CPU."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))
from placement_models import FAMILIES, actor_critic, loss_of, maps_of, parts
from tiny_models import EOS, PAD
from tiny_seq2seq import episodes

from algorithms import adapters
from algorithms.models import parameter_groups
from algorithms.policy import ActorCritic
from algorithms.sampling import SamplingSpec, sample_responses
from train.placement import dispatch, is_spread


def spread_on_cpu(model: ActorCritic) -> None:
    for name, device_map in maps_of(model).items():
        places = dict.fromkeys(device_map, torch.device("cpu"))
        dispatch(parts(model)[name], places, torch.device("cpu"))


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
