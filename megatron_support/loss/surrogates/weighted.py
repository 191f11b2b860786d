"""Surrogates linear in log p with a detached weight, or without a ratio: reinforce, topr, dppo_tv, dppo_kl, dro."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_support.loss.surrogates.base import SurrogateInputs, SurrogateOutput, register_surrogate


@register_surrogate("reinforce")
def reinforce(inputs: SurrogateInputs) -> SurrogateOutput:
    """Plain policy gradient.

    Formula: ``-A log p``. Williams 1992; for RLOO: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    curr_logprobs = inputs.curr_logprobs
    return SurrogateOutput(loss=curr_logprobs * -inputs.advantages, ratio=curr_logprobs.detach())


@register_surrogate("topr")
def topr(inputs: SurrogateInputs) -> SurrogateOutput:
    """Tapered off-policy REINFORCE: no ratio for positive advantages, a truncated one for negative ones.

    Formula: ``-A log p`` where A >= 0, ``-sg(clip(r, 0, 1)) A log p`` where A < 0.
    Le Roux et al. 2025, arXiv:2503.14286.
    """
    ratio = inputs.ratio.detach()
    bounded = ratio.clamp(max=1.0)
    negative = inputs.advantages < 0
    weight = torch.where(negative, bounded, 1.0)
    return SurrogateOutput(
        loss=inputs.curr_logprobs * (-weight * inputs.advantages),
        ratio=ratio,
        window=(0.0, 1.0),
        clipped=negative & (ratio > 1),
    )


@register_surrogate("dppo_tv")
def dppo_tv(inputs: SurrogateInputs, *, low: float, high: float, ratio_cap: float) -> SurrogateOutput:
    """Trust region on the token's probability: its change bounds the total variation from below.

    Formula: ``-sg(min(r, cap) m) A log p`` with m = [p - p_prev <= high] where A > 0, [p - p_prev >= -low] elsewhere.
    DPPO 2026, arXiv:2602.04879.
    """
    change = inputs.curr_logprobs.detach().exp() - inputs.prev_logprobs.exp()
    trusted = torch.where(inputs.advantages > 0, change <= high, change >= -low)
    return _trusted(inputs, trusted, ratio_cap)


@register_surrogate("dppo_kl")
def dppo_kl(inputs: SurrogateInputs, *, low: float, high: float, ratio_cap: float) -> SurrogateOutput:
    """Trust region on the KL divergence of {this token, any other} between the previous and the current policy.

    Formula: as dppo_tv with m = [kl <= high or p <= p_prev] where A > 0, [kl <= low or p >= p_prev] elsewhere,
    ``kl = p_prev log(p_prev / p) + (1 - p_prev) log((1 - p_prev) / (1 - p))``. DPPO 2026, arXiv:2602.04879.
    """
    curr_logprobs, prev_logprobs = inputs.curr_logprobs.detach(), inputs.prev_logprobs
    # At p = 1 rounding may leave log p a little above 0, and 1 - p below.
    p, p_prev = curr_logprobs.exp().clamp(max=1.0), prev_logprobs.exp().clamp(max=1.0)
    rest = 1 - p_prev
    kl = p_prev * (prev_logprobs - curr_logprobs) + torch.xlogy(rest, rest) - torch.xlogy(rest, 1 - p)
    positive = (kl <= high) | (p <= p_prev)
    negative = (kl <= low) | (p >= p_prev)
    return _trusted(inputs, torch.where(inputs.advantages > 0, positive, negative), ratio_cap)


@register_surrogate("dro")
def dro(inputs: SurrogateInputs, *, beta: float) -> SurrogateOutput:
    """Policy gradient with a quadratic penalty on the log-ratio.

    Formula: ``-(A log p - beta / 2 l^2)``. Richemond et al. 2024, arXiv:2405.19107.
    """
    penalty = 0.5 * beta * inputs.log_ratio.square()
    return SurrogateOutput(loss=penalty - inputs.curr_logprobs * inputs.advantages, ratio=inputs.ratio.detach())


def _trusted(inputs: SurrogateInputs, trusted: Tensor, ratio_cap: float) -> SurrogateOutput:
    ratio = inputs.ratio.detach()
    capped = ratio.clamp(max=ratio_cap)
    weight = torch.where(trusted, capped, 0.0)
    return SurrogateOutput(
        loss=inputs.curr_logprobs * (-weight * inputs.advantages),
        ratio=ratio,
        window=(0.0, ratio_cap),
        clipped=~trusted,
        bounded=trusted & (ratio > ratio_cap),
    )
