"""Models, episodes and a loss with which a sharded model is compared with a plain one in the same process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algorithms.models import load_actor_critic
from algorithms.policy import ActorCritic, Scores
from tools.make_tiny_model import FAMILIES, SEQ2SEQ_FAMILIES, build_model, numbers_tokenizer, save, wrap
from train.config_policy import Lora

RATES = {"learning_rate": 0.001, "critic_learning_rate": 0.002, "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2_shared": {"value_model": "shared"},
    "gpt2_lora": {"lora": Lora(r=4)},
    "llama": {},
    "llama_shared": {"value_model": "shared"},
    "llama_none": {"value_model": "none"},
    "llama_recomputed": {"gradient_checkpointing": True},
    "llama_lora": {"lora": Lora(r=4, target_modules="all-linear")},
    "qwen2": {},
    "qwen2_lora": {"lora": Lora(r=4)},
    "t5": {},
    "t5_shared": {"value_model": "shared"},
    "t5_recomputed": {"gradient_checkpointing": True},
    "bart": {},
    "blenderbot": {},  # names no classes of blocks
}


def make_models(folder: Path) -> Path:
    """A model of each family, of two layers, in folder/FAMILY; returns the folder."""
    for family in FAMILIES:
        tokenizer = wrap(numbers_tokenizer(29), 32, family)
        save(
            folder / family,
            build_model(family, tokenizer, layers=2, hidden=32, heads=4, positions=32, seed=0),
            tokenizer,
        )
    return folder


def episodes(rows: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some of four prompts, with responses of 5, 6, 4 and 2 tokens."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 30, (4, 11), generator=draw)
    prompt_mask = (torch.arange(5) >= torch.tensor([[0], [2], [1], [3]])).long()
    response_mask = torch.arange(6) < torch.tensor([[5], [6], [4], [2]])
    return tuple(x[list(rows)] for x in (ids[:, :5], prompt_mask, ids[:, 5:], response_mask))  # type: ignore[return-value]


EVERYTHING = episodes(range(4))


def loss_of(scores: Scores, mask: Tensor) -> Tensor:
    """A sum over the counted tokens in which every output takes part."""
    weights = torch.linspace(-1, 1, mask.shape[1])
    total = (scores.logprobs * weights + 0.1 * scores.entropy)[mask].sum()
    if scores.values is not None:
        total = total + 0.5 * ((scores.values[:, :-1] - weights)[mask] ** 2).sum()
    return total


def load(models: Path, case: str) -> ActorCritic:
    """The models of a case, always with the same weights; none of the new ones (value head, adapters) are zero."""
    family, options = case.split("_")[0], CASES[case]
    torch.manual_seed(5)
    model = load_actor_critic(str(models / family), seq2seq=family in SEQ2SEQ_FAMILIES, **options)
    with torch.no_grad():
        if model.value_head is not None:
            model.value_head.weight.copy_(torch.linspace(-0.1, 0.1, model.value_head.weight.numel()))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.policy.logits_chunk_bytes = 3 * 4 * model.policy.vocab_size  # three rows at a time
    return model


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """‖ours - theirs‖ / ‖theirs‖ over all tensors."""
    assert ours.keys() == theirs.keys()
    error = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in theirs)
    return (error / sum(float(x.double().square().sum()) for x in theirs.values())) ** 0.5


def weights(model: Any) -> dict[str, Tensor]:
    """Parameters by name, as they lie."""
    return dict(model.named_parameters())


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients that there are, by the parameter's name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
