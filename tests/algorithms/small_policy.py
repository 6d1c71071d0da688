"""A nonlinear policy so small that dense algebra checks TRPO on it; its episodes, its step, two ranks in threads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from algorithms.trpo import fisher_vector_product, kl_here, surrogate, trust_region_step
from algorithms.trust_region import assign, flatten, trainable

TARGET_KL, DAMPING = 0.01, 0.1


@dataclass
class Part:
    """A micro-batch of the stand-in policy: states [B, T, 3]; actions, old_logprobs, advantages, mask [B, T]."""

    states: Tensor
    actions: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    def rows(self, index: slice) -> "Part":
        return Part(*(x[index] for x in vars(self).values()))


class Policy(nn.Module):
    """Five actions, some 30 weights, tanh; one weight that nothing depends on and one that is frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 5)).double()
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
        self.allowed = torch.ones(5, dtype=torch.bool)

    def logits(self, part: Part) -> Tensor:
        logits: Tensor = self.net(part.states[part.mask]) * self.frozen
        return logits.masked_fill(~self.allowed, -torch.inf)

    def logprobs(self, part: Part) -> Tensor:
        chosen = self.logits(part).log_softmax(1).gather(1, part.actions[part.mask][:, None])
        return torch.full_like(part.advantages, torch.nan).index_put(part.mask.nonzero(as_tuple=True), chosen[:, 0])

    def objective(self, part: Part) -> Tensor:
        return surrogate(self.logprobs(part), part.old_logprobs, part.advantages, part.mask)[0]

    def kl(self, part: Part) -> Tensor:
        return kl_here(self.logits(part))


def episodes(policy: Policy, seed: int = 0) -> Part:
    """Six episodes of 0 to 7 tokens that `policy` sampled."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(7) < torch.tensor([7, 3, 0, 1, 5, 6])[:, None]
    states = torch.randn(6, 7, 3, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    part = Part(states, torch.zeros(6, 7, dtype=torch.int64), advantages, advantages, mask)
    with torch.no_grad():
        part.actions[mask] = torch.multinomial(policy.logits(part).softmax(1), 1, generator=generator)[:, 0]
        part.old_logprobs = policy.logprobs(part)
    return part


def take_step(policy: Policy, batches: Sequence[Part], **changes: Any) -> dict[str, float]:
    arguments = {
        "objective": policy.objective,
        "logits": policy.logits,
        "n_tokens": float(sum(batch.mask.sum() for batch in batches)),
        "reduce": lambda total: total,
        "target_kl": TARGET_KL,
        "damping": DAMPING,
    }
    return trust_region_step(trainable(policy), batches, **{**arguments, **changes})


def mean_kl_and_gain(policy: Policy, old: Tensor, part: Part) -> tuple[float, float]:
    """KL(π_old ‖ π) by PyTorch's own formula, and the gain in J, of the policy's present weights."""
    params = trainable(policy)
    new = flatten(params)
    with torch.no_grad():
        after, objective = Categorical(logits=policy.logits(part)), policy.objective(part)
        assign(params, old)
        before, baseline = Categorical(logits=policy.logits(part)), policy.objective(part)
        assign(params, new)
        return float(kl_divergence(before, after).mean()), float((objective - baseline) / part.mask.sum())


def dense_fisher(policy: Policy, part: Part) -> Tensor:
    params = trainable(policy)
    columns = torch.eye(len(flatten(params)), dtype=torch.float64)
    count = float(part.mask.sum())
    return torch.stack([fisher_vector_product(policy.kl, v, params, [part], count, lambda x: x) for v in columns], 1)


class TwoRanks:
    """An all-reduce between two threads, and their results."""

    def __init__(self) -> None:
        self.barrier, self.slots = threading.Barrier(2, timeout=60), [torch.zeros(0), torch.zeros(0)]

    def reduce(self, rank: int, tensor: Tensor) -> Tensor:
        self.slots[rank] = tensor
        self.barrier.wait()
        total = self.slots[0] + self.slots[1]
        self.barrier.wait()
        return total

    def run(self, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
        results: list[Any] = [None, None]

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank, lambda tensor: self.reduce(rank, tensor))
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
