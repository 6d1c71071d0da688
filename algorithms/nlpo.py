"""Natural language policy optimisation (Ramamurthy et al. 2023): PPO whose support at each step is a mask.

The mask is the top-p or top-k set of a mask policy, a lagged copy of the policy. It is made here; sampling applies and
stores it, scoring replays it, so that the probability ratio is that of the restricted distributions.
"""

import torch
from torch import Tensor, nn

STATISTICS = ("nlpo/mask_size", "nlpo/mask_mass", "nlpo/hit_rate")


def top_mask(logits: Tensor, *, mask_type: str, size: float, min_tokens_to_keep: int = 1) -> Tensor:
    """The mask's tokens, bool [B, V]. logits: float32 [B, V], of the mask policy (of the policy itself for "topk").

    learned_top_p: the smallest set whose probability reaches `size`, the token that crosses it included.
    learned_top_k, topk: the `size` likeliest tokens. At least `min_tokens_to_keep`, the likeliest, are in it.
    """
    vocab = logits.shape[1]
    if (mask_type == "learned_top_p" and size >= 1) or (mask_type != "learned_top_p" and size >= vocab):
        return torch.ones_like(logits, dtype=torch.bool)
    if mask_type == "learned_top_p":
        probs, order = logits.softmax(1).sort(dim=1, descending=True, stable=True)
        kept = probs.cumsum(1) - probs < size  # what stands before the token: the one that crosses stays
        kept[:, :min_tokens_to_keep] = True
        return torch.zeros_like(kept).scatter(1, order, kept)
    best = logits.topk(min(vocab, max(int(size), min_tokens_to_keep)), dim=1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)


def mask_statistics(logits: Tensor, allowed: Tensor, temperature: float) -> Tensor:
    """What a mask does to the policy, float32 [B, 3] (STATISTICS): tokens in it, the policy's probability inside it,
    and whether its likeliest token is inside. logits: float32 [B, V] of the policy; allowed: bool [B, V]."""
    probs = (logits / temperature).softmax(1)
    inside = torch.where(allowed, probs, 0).sum(1)
    hit = allowed.gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
    return torch.stack([allowed.sum(1).float(), inside, hit.float()], 1)


@torch.no_grad()
def copy_weights(policy: nn.Module, mask_policy: nn.Module) -> None:
    """ψ ← θ: the mask policy, in place, becomes the policy. Both have the same architecture."""
    for target, source in zip(mask_policy.parameters(), policy.parameters(), strict=True):
        target.copy_(source)
