"""The numerical half of TRPO: parameters as one vector, conjugate gradient, backtracking. Knows nothing of policies.

Vectors are float32 (float64 for float64 parameters); their inner products are float64. Whatever is decided here follows
from the arguments alone, so ranks that hold the same numbers take the same decisions.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_DOT_CHUNK = 2**24


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a step may move, tied ones once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """All values as one new vector [D], where the first lies. bf16 and fp16 become float32, which loses nothing."""
    parts = list(tensors)
    kinds = [torch.promote_types(x.dtype, torch.float32) for x in parts]
    with torch.no_grad():
        return torch.cat([x.reshape(-1).to(parts[0].device, kind) for x, kind in zip(parts, kinds, strict=True)])


def split_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`vector` [D] in the shapes of `tensors` and on their devices, views where that is its own: undoes `flatten`."""
    pieces = vector.split([x.numel() for x in tensors])
    return [piece.view(x.shape).to(x.device) for piece, x in zip(pieces, tensors, strict=True)]


def assign(params: Sequence[Tensor], vector: Tensor) -> None:
    """Write `vector` into `params`. After `assign(params, flatten(params))` every bit is as before."""
    with torch.no_grad():
        for parameter, piece in zip(params, split_like(vector, params), strict=True):
            parameter.copy_(piece)


def dot(a: Tensor, b: Tensor) -> float:
    """Inner product of two vectors [D] in float64, a chunk at a time."""
    pieces = zip(a.split(_DOT_CHUNK), b.split(_DOT_CHUNK), strict=True)
    return float(sum(x.double() @ y.double() for x, y in pieces))


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], g: Tensor, *, max_steps: int = 15, tolerance: float = 1e-10
) -> tuple[Tensor, Tensor]:
    """(x, g - A·x) for A·x = g, A symmetric positive definite and given by `product` (Hestenes and Stiefel 1952).

    Starts at zero. Ends after `max_steps` products, when |g - A·x|² < tolerance, or where the curvature is not positive
    (NaN included): x is then what was reached before. g = 0 gives x = 0.
    """
    x, residual, direction = torch.zeros_like(g), g.clone(), g.clone()
    squared = dot(residual, residual)
    for _ in range(max_steps if squared > 0 else 0):
        image = product(direction)
        curvature = dot(direction, image)
        if not curvature > 0:
            break
        x.add_(direction, alpha=squared / curvature)
        residual.sub_(image, alpha=squared / curvature)
        previous, squared = squared, dot(residual, residual)
        if squared < tolerance:
            break
        direction.mul_(squared / previous).add_(residual)
    return x, residual


@dataclass(frozen=True, kw_only=True)
class LineSearch:
    """parameters [D]: the accepted ones, or the old. tries: points evaluated. scale: share of the full step taken.
    kl and improvement: of the accepted point. Without one, scale, kl and improvement are 0."""

    parameters: Tensor
    accepted: bool
    tries: int
    scale: float = 0.0
    kl: float = 0.0
    improvement: float = 0.0


def line_search(
    evaluate: Callable[[Tensor], tuple[float, float]],
    old: Tensor,
    step: Tensor,
    objective: float,
    target_kl: float,
    *,
    shrink: float = 0.8,
    max_tries: int = 10,
) -> LineSearch:
    """The first of old + shrink^i · step, i < max_tries, with KL < target_kl and more than the old `objective`.

    `evaluate(parameters)` gives (objective, KL); NaN in either is a no. A step of zeros is refused without trying.
    (Schulman et al. 2015, appendix C.)
    """
    tries = max_tries if step.any() else 0
    for i in range(tries):
        scale = shrink**i
        candidate = old + scale * step
        reached, kl = evaluate(candidate)
        improvement = reached - objective
        if kl < target_kl and improvement > 0:
            return LineSearch(
                parameters=candidate, accepted=True, tries=i + 1, scale=scale, kl=kl, improvement=improvement
            )
    return LineSearch(parameters=old, accepted=False, tries=tries)
