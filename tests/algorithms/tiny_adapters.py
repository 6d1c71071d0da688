"""Folders of tiny models and of adapters for them, and what scores and trains a policy with one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny_models import make_lm
from tiny_seq2seq import episodes, make_seq2seq
from torch import Tensor, nn

from algorithms import adapters
from algorithms.lora import adapter_weights
from algorithms.models import load_actor_critic, load_language_model, parameter_groups
from algorithms.policy import ActorCritic, LanguageModel, Scores

FAMILIES = ["gpt2", "llama", "t5"]


def lora(r: int = 4, alpha: float = 8.0, target_modules: Any = None) -> Any:
    """What a configuration says of adapters."""
    return SimpleNamespace(r=r, alpha=alpha, target_modules=target_modules)


def kind(family: str) -> dict[str, Any]:
    """The loading functions' keywords for a family."""
    return {"seq2seq": family in ("t5", "bart")}


def save_base(family: str, folder: Path, **changes: Any) -> str:
    """A random model of the family, as a model_name."""
    make = make_seq2seq if kind(family)["seq2seq"] else make_lm
    make(family, **changes).save_pretrained(folder)
    return str(folder)


def shake(module: nn.Module, seed: int = 3) -> None:
    """Gives the adapters in the module weights that matter; a fresh one changes nothing."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in adapter_weights(module).values():
            weight.add_(0.3 * torch.randn_like(weight))


def save_adapter(family: str, base: str, folder: Path, spec: Any = None) -> str:
    """The folder of an adapter that changes what `base` says, as a model_name."""
    policy = load_language_model(base, lora=spec or lora(), **kind(family))
    shake(policy)
    adapters.save_pretrained(policy, folder)
    return str(folder)


def load(family: str, model_name: str, spec: Any = None, **options: Any) -> ActorCritic:
    """Policy and critic, with a value head that passes gradients on."""
    torch.manual_seed(0)
    model = load_actor_critic(model_name, lora=spec, **kind(family), **options)
    torch.manual_seed(1)
    if model.value_head is not None:
        nn.init.normal_(model.value_head.weight, std=0.3)
    return model


def scores_of(model: Any) -> Scores:
    """Without gradients, of the same episodes always."""
    with torch.no_grad():
        scores: Scores = model(**episodes(), unrestricted=True)
    return scores


def loss_of(model: ActorCritic) -> Tensor:
    """A loss to which log-probabilities, entropies and values contribute."""
    inputs = episodes()
    scores, mask = model(**inputs), inputs["response_mask"]
    loss = (scores.logprobs * torch.linspace(-1, 2, mask.numel()).view(mask.shape)).sum() - 0.1 * scores.entropy.sum()
    return loss if scores.values is None else loss + ((scores.values[:, :-1] - 1) ** 2)[mask].sum()


def train(model: ActorCritic, steps: int = 3) -> None:
    """A few optimizer steps, each of which asks the reference between forward and backward."""
    groups = parameter_groups(model, learning_rate=1e-2, critic_learning_rate=1e-2, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups)
    reference = adapters.reference_of(model.policy)
    for _ in range(steps):
        loss = loss_of(model)
        reference(**episodes())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def last_states(policy: LanguageModel, trunk: Any) -> Tensor:
    """The critic's hidden states of the episodes' prompts read as one sequence, [B, ·, H]."""
    inputs = {name: x for name, x in episodes().items() if name in ("prompt_ids", "prompt_mask", "response_ids")}
    with torch.no_grad():
        states: Tensor = trunk(**policy.inputs(**inputs), use_cache=False).last_hidden_state
    return states
