"""TRPO's step of the policy on fake tensors, as train.trpo takes it."""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from algorithms.trpo import restricted_logits, surrogate, trust_region_step
from algorithms.trust_region import trainable
from tools.plan_work import Work

Precision = Callable[[], contextlib.AbstractContextManager[Any]]


def trpo_update(policy: Any, work: Work, precision: Precision) -> None:
    """Gradient, two steps of the conjugate gradient, one of the line search, on one micro-batch."""

    def objective(part: dict[str, Any]) -> Tensor:
        with precision():
            now = policy(**part)
        zeros = now.logprobs.detach()
        return surrogate(now.logprobs, zeros, zeros, part["response_mask"])[0]

    def logits(part: dict[str, Any]) -> Tensor:
        with precision():
            return restricted_logits(policy, **part)

    trust_region_step(
        trainable(policy),
        [work.inputs(work.step_rows, policy)],
        objective=objective,
        logits=logits,
        n_tokens=1.0,
        reduce=lambda x: x,
        cg_max_steps=2,
        max_tries=1,
    )
