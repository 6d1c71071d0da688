"""Padded batches: where the padding stands, and the positions of the tokens beside it."""

import inspect

import torch
from torch import Tensor, nn


def to_right(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Left-padded rows [B, P] rolled so that their padding stands on the right; returns (ids, mask), both [B, P].

    An encoder with absolute positions counts them from the first column: only so do they start at the first token.
    """
    width = mask.shape[1]
    padding = width - mask.sum(1, keepdim=True)
    columns = (torch.arange(width, device=mask.device) + padding) % width
    return ids.gather(1, columns), mask.gather(1, columns)


def join(prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Input [B, P+T] of a causal model, and its attention mask.

    Padding after a response is marked as real: nothing that counts attends to what comes after it, and an unbroken mask
    lets attention take its fast causal path.
    """
    after = torch.ones_like(response_ids, dtype=prompt_mask.dtype)
    return torch.cat([prompt_ids, response_ids], 1), torch.cat([prompt_mask, after], 1)


def positions(mask: Tensor) -> Tensor:
    """Position of each token, counted over the mask only, so that left padding does not shift it. [B, L] → [B, L]."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def takes_position_ids(lm: nn.Module) -> bool:
    """Whether the model's forward has position_ids (ALiBi families such as BLOOM derive positions from the mask)."""
    return "position_ids" in inspect.signature(lm.forward).parameters
