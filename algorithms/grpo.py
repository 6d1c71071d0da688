"""Group relative policy optimisation (Shao et al. 2024) and its critic-free relatives, as functions over tensors.

They differ from PPO in the advantages (`algorithms.advantages.group_advantages`) and in what a token weighs.
"""

from torch import Tensor

from algorithms.ppo import Stats, policy_loss, regularised


def token_weights(response_mask: Tensor, lengths: Tensor, normalization: str) -> Tensor:
    """Weights [B, T] of the tokens in the loss: 1, or with "sequence" 1 / length of the response.

    response_mask: bool [B, T]; lengths: [B], of whole responses, of which the mask may hold the first tokens only.
    """
    assert normalization in ("token", "sequence", "constant"), normalization
    weights = response_mask.float()
    return weights / lengths[:, None] if normalization == "sequence" else weights


def loss_count(response_mask: Tensor, lengths: Tensor, normalization: str, max_length: int) -> Tensor:
    """What the summed loss of these responses is to be divided by: their number of tokens ("token"), their number
    ("sequence"), or that times `max_length` ("constant": Liu et al. 2025, without a bias to any length). Scalar.

    Of a response that is not all in the mask, the share that is in it counts.
    """
    if normalization == "token":
        return response_mask.sum()
    responses = token_weights(response_mask, lengths, "sequence").sum()
    return responses if normalization == "sequence" else responses * max_length


def grpo_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    weights: Tensor,
    count: Tensor,
    response_mask: Tensor,
    clip_range: float,
    ent_coef: float,
    kl_coef: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    kl: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Σ w·(-min(A·ρ, A·clip(ρ)) - ent_coef·H + kl_coef·KL) (eq. 3 of Shao et al.). Tensors [B, T]; (sum, stats).

    weights: see `token_weights`; count: see `loss_count`, for the statistics of the loss.
    """
    pg_loss, pg_stats = policy_loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=weights * advantages,  # a positive factor: it leaves the minimum's choice as it is
        response_mask=response_mask,
        clip_range=clip_range,
        clip_range_high=clip_range_high,
        dual_clip=dual_clip,
    )
    loss, own = regularised(
        pg_loss,
        entropy=entropy,
        kl=kl,
        response_mask=response_mask,
        ent_coef=ent_coef,
        kl_coef=kl_coef,
        weights=weights,
    )
    losses = {"loss/policy": (pg_loss.detach(), count), "loss/total": (loss.detach(), count)}
    return loss, {**pg_stats, **own, **losses}
