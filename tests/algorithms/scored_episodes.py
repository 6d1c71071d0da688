"""Episodes of tiny models, and the models that score them; made once and not to be changed."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from tiny_models import EOS, PAD, length_mask, make_lm, make_prompts, shared_lm
from torch import Tensor

from algorithms.policy import ActorCritic, LanguageModel, Scores
from algorithms.sampling import SamplingSpec, sample_responses

T = 8
LENGTHS = [6, 2, 4, 1]
SPECS = {
    "plain": SamplingSpec(max_new_tokens=T),
    "temperature": SamplingSpec(max_new_tokens=T, temperature=0.7),
    "top_k": SamplingSpec(max_new_tokens=T, top_k=5),
    "top_p": SamplingSpec(max_new_tokens=T, top_p=0.8),
    "min_new_tokens": SamplingSpec(max_new_tokens=T, min_new_tokens=4),
    "all": SamplingSpec(max_new_tokens=T, temperature=0.7, top_k=15, top_p=0.9, min_new_tokens=2),
}


@functools.cache
def episodes(lm: torch.nn.Module, spec: SamplingSpec) -> Mapping[str, Any]:
    """Arguments of a forward: left-padded prompts, right-padded responses that were cut at several lengths."""
    prompt_ids, prompt_mask = make_prompts(LENGTHS, width=7)
    u = torch.rand(len(LENGTHS), T, generator=torch.Generator().manual_seed(4))
    got = sample_responses(
        LanguageModel(lm), prompt_ids, prompt_mask, u, spec, eos_token_ids=[EOS], stop_on_eos=False, pad_token_id=PAD
    )
    mask = length_mask(torch.tensor([T, 3, 1, 6]), T)
    found = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "response_ids": torch.where(mask, got.ids, PAD),
        "response_mask": mask,
        "action_mask": got.action_mask,
        "temperature": spec.temperature,
    }
    return MappingProxyType(found)


@functools.cache
def actor_critic(family: str, *, shared: bool = False) -> ActorCritic:
    """Policy and critic of one family, with a value head that says something."""
    model = ActorCritic(LanguageModel(shared_lm(family)), None if shared else make_lm(family, seed=9).base_model)
    torch.manual_seed(2)
    torch.nn.init.normal_(model.value_head.weight, std=0.3)
    return model.eval()


def counted(scores: Scores, mask: Tensor) -> dict[str, Tensor]:
    """Everything that anyone may use: scores of counted tokens, values up to the one after the last."""
    state_mask = torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
    found = {name: getattr(scores, name)[mask] for name in ("logprobs", "entropy", "raw_logprobs")}
    return found if scores.values is None else {**found, "values": scores.values[state_mask]}
