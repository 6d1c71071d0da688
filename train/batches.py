"""The batch of one iteration, and how it is cut into minibatches and micro-batches."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from algorithms.masked import moments, whiten
from train.distributed import Ranks


@dataclass(kw_only=True)
class Rollout:
    """The transitions of one iteration and rank: B episodes, response_mask counts exactly n_steps · n_envs tokens.

    prompt_ids, prompt_mask: int64 [B, P], left-padded. response_ids: int64 [B, T], right-padded.
    response_mask: bool [B, T], True up to and including EOS and inside the token budget (the last episode may be cut).
    loss_mask: bool [B, T], the part of it that counts in the losses: all, unless env.args.mask_truncated.
    action_mask: uint8 [B, T, ceil(V/8)], packed, or None. mask_statistics: float32 [B, T, 3] of NLPO's mask, or None
    (see algorithms.nlpo.mask_statistics).
    old_logprobs, ref_logprobs, old_values, task_rewards, kl, rewards, advantages, returns: float32 [B, T], 0 outside
    response_mask.
    lengths: int64 [B], of whole responses, also where the budget cuts them. bootstrap: float32 [B], V after the last
    counted token, 0 where the episode is over. complete, truncated: bool [B]; only a complete episode has its terminal
    reward in the batch. indices: int64 [B], the samples' positions in the training split.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    action_mask: Tensor | None
    mask_statistics: Tensor | None
    old_logprobs: Tensor
    ref_logprobs: Tensor
    old_values: Tensor
    task_rewards: Tensor
    kl: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    lengths: Tensor
    bootstrap: Tensor
    complete: Tensor
    truncated: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.response_ids)

    def rows(self, index: Tensor) -> "Rollout":
        """Some episodes, with the padding that they do not need taken off both sides."""
        part = {f.name: None if (x := getattr(self, f.name)) is None else x[index] for f in fields(self)}
        width = int(part["prompt_mask"].sum(1).max())
        length = max(1, int(part["response_mask"].sum(1).max()))
        for name, x in part.items():
            if name.startswith("prompt_"):
                part[name] = x[:, x.shape[1] - width :]
            elif x is not None and x.ndim > 1:
                part[name] = x[:, :length]
        return Rollout(**part)


def micro_batches(tokens: Tensor, size: int) -> list[Tensor]:
    """Row numbers in groups of at most `size`, sorted by length so that little is padded. tokens: int64 [B]."""
    return list(tokens.argsort(descending=True, stable=True).split(size))


def balanced_parts(tokens: Sequence[int], n_parts: int, rng: np.random.Generator) -> list[list[int]]:
    """Shuffled episode numbers in `n_parts` parts with about equal tokens: longest first, each to the lightest part."""
    order = rng.permutation(len(tokens))
    order = order[np.argsort(-np.asarray(tokens)[order], kind="stable")]
    heap = [(0, part) for part in rng.permutation(n_parts).tolist()]
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    for episode in order.tolist():
        load, part = heapq.heappop(heap)
        parts[part].append(episode)
        heapq.heappush(heap, (load + tokens[episode], part))
    return parts


def minibatches(
    rollout: Rollout,
    ranks: Ranks,
    rng: np.random.Generator,
    *,
    batch_size: int,
    micro_batch_size: int,
    whiten_each: bool,
) -> Iterator[list[Rollout]]:
    """One pass over the rollout: for each optimizer step the micro-batches whose gradients it adds up.

    The numbers of minibatches and of micro-batches are the same on every rank; a rank that has fewer adds ones in which
    no token counts. `whiten_each`: normalise advantages over each minibatch, over all ranks.
    """
    tokens = rollout.response_mask.sum(1)
    n_parts = int(ranks.min(torch.tensor(min(-(-int(tokens.sum()) // batch_size), len(rollout)))))
    parts = [torch.tensor(part, device=tokens.device) for part in balanced_parts(tokens.tolist(), n_parts, rng)]
    plans = [[part[rows] for rows in micro_batches(tokens[part], micro_batch_size)] for part in parts]
    n_micro = ranks.max(torch.tensor([len(plan) for plan in plans]))
    if whiten_each:
        totals = ranks.sum(torch.stack([moments(rollout.advantages[p], rollout.loss_mask[p]) for p in parts]))
    for i, plan in enumerate(plans):
        micro = [rollout.rows(rows) for rows in plan]
        nothing = torch.zeros_like(micro[-1].response_mask)
        blank = replace(micro[-1], response_mask=nothing, loss_mask=nothing)
        micro += [blank] * (int(n_micro[i]) - len(micro))
        if whiten_each:
            for part in micro:
                part.advantages = whiten(part.advantages, part.loss_mask, totals[i])
        yield micro
