"""Trust region policy optimisation (Schulman et al. 2015) as functions over tensors.

Maximise J = mean A·ρ subject to mean KL(π_old ‖ π) ≤ target_kl, means over all response tokens of all ranks. Everything
here sums over the tokens of a micro-batch; `reduce` adds the sums of the ranks.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from algorithms import ppo
from algorithms.packing import unpack_mask
from algorithms.policy import LanguageModel
from algorithms.trust_region import assign, conjugate_gradient, dot, flatten, line_search, split_like

Batch = TypeVar("Batch")
Reduce = Callable[[Tensor], Tensor]


def surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, ppo.Stats]:
    """J = Σ A·ρ (eq. 14), ρ = exp(logprobs - old_logprobs): PPO's without the clip. All [B, T]. To be MAXIMISED.

    Returns (sum, stats); `loss/policy` is -J, as for the other algorithms.
    """
    loss, stats = ppo.policy_loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        response_mask=response_mask,
        clip_range=math.inf,
    )
    del stats["policy/clip_fraction"]
    return -loss, stats


@contextlib.contextmanager
def double_differentiable(model: nn.Module) -> Iterator[None]:
    """Forward passes in here can be differentiated twice: attention is made of plain products, not of a fused kernel.

    Raises ValueError for an attention of transformers that has no second derivative, whatever PyTorch is told.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for name in {str(module.config._attn_implementation) for module in models} - {"sdpa", "eager"}:
        raise ValueError(
            f"TRPO differentiates the policy twice, and attention with attn_implementation={name!r} cannot be: "
            "load the model with attn_implementation='sdpa' (or 'eager')"
        )
    with sdpa_kernel(SDPBackend.MATH):
        yield


def restricted_logits(
    model: LanguageModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    response_ids: Tensor,
    response_mask: Tensor,
    *,
    temperature: float = 1.0,
    action_mask: Tensor | None = None,
) -> Tensor:
    """Logits of the distributions that were sampled from: float32 [N, V], a row per counted token, row-major.

    Arguments as in `LanguageModel.forward`; tokens outside the action mask get -inf. Where gradients are on, they can
    be taken twice. Gradient checkpointing runs the model again outside of this function: with it, the whole step has to
    stand in `double_differentiable`.
    """
    with double_differentiable(model) if torch.is_grad_enabled() else contextlib.nullcontext():
        logits = model.token_logits(prompt_ids, prompt_mask, response_ids, response_mask)
    if temperature != 1.0:
        logits = logits / temperature
    if action_mask is not None:
        allowed = unpack_mask(action_mask[response_mask.nonzero(as_tuple=True)], logits.shape[1])
        logits = logits.masked_fill(~allowed, -torch.inf)
    return logits


def kl_sum(old_logits: Tensor, new_logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Σ over N of KL(π_old ‖ π_new) = Σ_v p_old·(log p_old - log p_new), nats. Twice differentiable in new_logits.

    Logits [N, V], not necessarily normalised, of distributions restricted to `mask` (bool [N, V], True = allowed) or
    holding -inf already: what the old one excludes adds nothing.
    """
    if mask is not None:
        old_logits, new_logits = (x.masked_fill(~mask, -torch.inf) for x in (old_logits, new_logits))
    old, new = old_logits.log_softmax(1), new_logits.log_softmax(1)
    probabilities = old.exp()
    gap = torch.where(probabilities > 0, old - new, 0)  # -inf - -inf and 0 · inf are NaN
    return (probabilities * gap).sum()


def kl_here(logits: Tensor) -> Tensor:
    """`kl_sum` of a policy to itself as it stands: 0, with gradient 0 and the Fisher matrix as second derivative."""
    return kl_sum(logits.detach(), logits)


def sub_sample(response_mask: Tensor, factor: int) -> Tensor:
    """Every `factor`-th counted token of a mask [B, T], row-major, beginning with the first."""
    order = response_mask.flatten().cumsum(0).view_as(response_mask) - 1
    return response_mask & (order % factor == 0)


def fisher_vector_product(
    kl: Callable[[Batch], Tensor],
    vector: Tensor,
    params: Sequence[Tensor],
    batches: Sequence[Batch],
    n_tokens: float,
    reduce: Reduce,
) -> Tensor:
    """F·vector [D], F = ∇² mean KL(π_old ‖ π) at π = π_old: the Fisher matrix (appendix C.1). No damping is added.

    `kl(batch)` is the `kl_here` of the batch's `restricted_logits`; one micro-batch's graph exists at a time. n_tokens:
    global count. Parameters without influence give zeros.
    """
    pieces, total = split_like(vector, params), torch.zeros_like(vector)
    for batch in batches:
        first = torch.autograd.grad(kl(batch), params, create_graph=True, allow_unused=True, materialize_grads=True)
        slopes = [(gradient * piece).sum() for gradient, piece in zip(first, pieces, strict=True)]
        slope = torch.stack([x.to(vector.device) for x in slopes]).sum()
        total += flatten(torch.autograd.grad(slope, params, allow_unused=True, materialize_grads=True))
    return reduce(total) / n_tokens


def mean_gradient(
    total: Callable[[Batch], Tensor],
    params: Sequence[Tensor],
    batches: Sequence[Batch],
    n_tokens: float,
    reduce: Reduce,
) -> Tensor:
    """Gradient [D] of the sums `total(batch)` over all batches and ranks, divided by n_tokens.

    Raises FloatingPointError, on all ranks together, if it is not finite.
    """
    gradient = torch.zeros_like(flatten(params))
    for batch in batches:
        gradient += flatten(torch.autograd.grad(total(batch), params, allow_unused=True, materialize_grads=True))
    gradient = reduce(gradient) / n_tokens
    if not gradient.isfinite().all():
        raise FloatingPointError("the gradient is not finite; nothing was changed")
    return gradient


def measure(
    vector: Tensor,
    old: Tensor,
    params: Sequence[Tensor],
    batches: Sequence[Batch],
    objective: Callable[[Batch], Tensor],
    logits: Callable[[Batch], Tensor],
) -> Tensor:
    """(Σ objective, Σ KL(π_old ‖ π)) of the parameters `vector` [D] over `batches`, float64 [2].

    Changes `params`, also after an error. Old logits are computed again: all of them together, [tokens, V], may be
    larger than the model.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=old.device)
    with torch.no_grad():
        for batch in batches:
            assign(params, old)
            before = logits(batch)
            assign(params, vector)
            sums += torch.stack([objective(batch).double(), kl_sum(before, logits(batch)).double()]).to(old.device)
    return sums


def trust_region_step(
    params: Sequence[Tensor],
    batches: Sequence[Batch],
    *,
    objective: Callable[[Batch], Tensor],
    logits: Callable[[Batch], Tensor],
    n_tokens: float,
    reduce: Reduce,
    target_kl: float = 0.01,
    damping: float = 0.1,
    cg_max_steps: int = 15,
    shrink: float = 0.8,
    max_tries: int = 10,
    fisher_batches: Sequence[Batch] | None = None,
    fisher_tokens: float | None = None,
) -> dict[str, float]:
    """One step of the policy (algorithm 1 with appendix C): moves `params`, or leaves every bit of them as it was.

    `objective(batch)` and `logits(batch)` are `surrogate` and `restricted_logits` of this rank's micro-batches with
    what stands in `params` when called; n_tokens: count of all ranks; fisher_batches, fisher_tokens: others for the
    Fisher matrix alone. reduce: sum over ranks, equal on each. Returns metrics, global, KL and norm 0 if refused.
    """
    sample, count = (batches, n_tokens) if fisher_batches is None else (fisher_batches, fisher_tokens)
    assert count is not None, "fisher_batches without their fisher_tokens"
    old = flatten(params)

    def damped_fisher(vector: Tensor) -> Tensor:
        return (
            fisher_vector_product(lambda batch: kl_here(logits(batch)), vector, params, sample, count, reduce)
            + damping * vector
        )

    def evaluate(vector: Tensor) -> tuple[float, float]:
        means = reduce(measure(vector, old, params, batches, objective, logits)) / n_tokens
        return float(means[0]), float(means[1])

    gradient = mean_gradient(objective, params, batches, n_tokens, reduce)
    direction, residual = conjugate_gradient(damped_fisher, gradient, max_steps=cg_max_steps)
    curvature = dot(direction, gradient - residual)  # sᵀ(F + damping·I)s without another product
    step = direction * (math.sqrt(2 * target_kl / curvature) if curvature > 0 else 0.0)
    found = line_search(evaluate, old, step, evaluate(old)[0], target_kl, shrink=shrink, max_tries=max_tries)
    assign(params, found.parameters)
    return {
        "policy/kl": found.kl,
        "policy/surrogate_improvement": found.improvement,
        "policy/line_search_success": float(found.accepted),
        "policy/line_search_steps": float(found.tries),
        "policy/step_norm": found.scale * math.sqrt(dot(step, step)),
        "policy/cg_residual": math.sqrt(dot(residual, residual) / max(dot(gradient, gradient), 1e-300)),
    }
