"""Generating from weights that lie in parts on the ranks: gathered once, or layer by layer with all ranks in step."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import psutil
import torch
from torch import nn

from train.distributed import Ranks

SHARE = 0.7
"""Of the memory that is free, the most that gathered weights may take: caches and logits come on top."""


@contextlib.contextmanager
def generating(
    ranks: Ranks, models: Sequence[nn.Module], gather: str, say: Callable[[str], None] = print
) -> Iterator[Callable[[bool], bool]]:
    """Context in which `models` generate; yields `going_on(more)`: whether another step follows.

    Where weights are whole, each rank goes on while it has `more` to do. In step, all go on while any of them has.
    gather: "always", "never", or "auto", which depends on free memory (see `config.generation`).
    """
    strategy = ranks.strategy
    if not strategy.in_step or gather == "always" or (gather == "auto" and fits(ranks, models, say)):
        with strategy.gathered(*models):
            yield bool
    else:
        with strategy.in_parts(*models):
            yield ranks.agree_any


def fits(ranks: Ranks, models: Sequence[nn.Module], say: Callable[[str], None]) -> bool:
    """Whether every rank has room for the whole weights of `models`; said once, the first time."""
    weights = {id(p): p for model in models for p in model.parameters()}.values()
    needed = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in weights)
    free = free_memory(ranks)
    enough = not ranks.agree_any(needed > SHARE * free)
    if not getattr(ranks, "said_gather", False):
        ranks.said_gather = True  # type: ignore[attr-defined]
        how = "weights are gathered for each rollout" if enough else "weights stay in parts, all ranks in step"
        say(f"generation.gather auto: {needed / 2**30:.2f} GiB of {free / 2**30:.1f} GiB free: {how}")
    return enough


def free_memory(ranks: Ranks) -> float:
    """Bytes that this rank may take on its device: on a CPU, its share of the machine's."""
    if ranks.device.type == "cuda":
        cached = torch.cuda.memory_reserved(ranks.device) - torch.cuda.memory_allocated(ranks.device)
        return float(torch.cuda.mem_get_info(ranks.device)[0] + cached)
    return psutil.virtual_memory().available / ranks.local_world_size
