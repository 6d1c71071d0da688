"""Action masks in an eighth of their memory: eight tokens a byte."""

import torch
from torch import Tensor

_BITS = (128, 64, 32, 16, 8, 4, 2, 1)


def pack_mask(mask: Tensor) -> Tensor:
    """Boolean [..., V] → uint8 [..., ceil(V/8)], eight tokens a byte, the lowest id in the highest bit."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    packed: Tensor = (padded * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack_mask(packed: Tensor, vocab_size: int) -> Tensor:
    """Inverse of `pack_mask`: uint8 [..., ceil(V/8)] → boolean [..., V]."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    bits: Tensor = (packed.unsqueeze(-1) & weights).bool().flatten(-2)[..., :vocab_size]
    return bits
