"""Surrogates that clip the importance ratio: ppo_clip, cispo, on_policy, sapo, gmpo."""

from __future__ import annotations

import math

import torch

from megatron_support.loss.surrogates.base import PessimisticClip, SurrogateInputs, SurrogateOutput, register_surrogate


@register_surrogate("ppo_clip")
def ppo_clip(
    inputs: SurrogateInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> SurrogateOutput:
    """Pessimistic clipped surrogate, with asymmetric bounds and an optional bound for negative advantages.

    Formula: ``-min(r A, clip(r, 1 - low, 1 + high) A)``; where A < 0 at most ``-c A``.
    Schulman et al. 2017, arXiv:1707.06347; asymmetric: Yu et al. 2025, arXiv:2503.14476; dual: Ye et al. 2020,
    arXiv:1912.09729. With ratio_level sequence it is GSPO: Zheng et al. 2025, arXiv:2507.18071.

    The minimum is written as ``r (c A - A) - clip(r) c A`` with c 1 where the clip holds, else 0: one multiplication
    backwards, and a clipped token has gradient exactly 0.
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    plain = ratio.detach()
    clipped_ratio = plain.clamp(1 - clip_low, 1 + clip_high)
    excess = (plain - clipped_ratio).mul_(advantages)
    clipped = torch.gt(excess, 0.0, out=excess)
    clipped_advantages = clipped * advantages
    slope = clipped_advantages - advantages
    loss = (ratio * slope).sub_(clipped_advantages.mul_(clipped_ratio))
    bounded = None
    if dual_clip is not None:
        bounded = (advantages < 0) & (loss.detach() > dual_clip * -advantages)
        loss = torch.where(bounded, dual_clip * -advantages, loss)
    window = (1 - clip_low, 1 + clip_high)
    return SurrogateOutput(
        loss=loss,
        ratio=plain,
        window=window,
        clipped=clipped,
        pessimistic=PessimisticClip(
            ratio=plain, advantages=advantages, window=window, clipped=clipped, clipped_ratio=clipped_ratio
        ),
        bounded=bounded,
        zero_outside=True,
    )


@register_surrogate("cispo")
def cispo(inputs: SurrogateInputs, *, clip_low: float, clip_high: float) -> SurrogateOutput:
    """REINFORCE weighted by the clipped ratio: every token keeps a gradient.

    Formula: ``-sg(clip(r, 1 - low, 1 + high)) A log p``. MiniMax 2025, arXiv:2506.13585.
    """
    ratio = inputs.ratio.detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = inputs.curr_logprobs * (-bounded * inputs.advantages)
    return SurrogateOutput(loss=loss, ratio=ratio, window=(1 - clip_low, 1 + clip_high), clipped=ratio != bounded)


@register_surrogate("on_policy")
def on_policy(inputs: SurrogateInputs) -> SurrogateOutput:
    """Policy gradient for exactly one update per rollout: the ratio is 1 and carries the gradient of log p.

    Formula: ``-r A`` with ``r = p / sg(p)``. Williams 1992.
    """
    return SurrogateOutput(loss=inputs.ratio * -inputs.advantages, ratio=inputs.ratio.detach())


@register_surrogate("sapo")
def sapo(inputs: SurrogateInputs, *, tau_positive: float, tau_negative: float) -> SurrogateOutput:
    """Soft gate in place of the clip.

    Formula: ``-(4 / tau) sigmoid(tau (r - 1)) A``, tau_positive where A > 0, else tau_negative.
    Gao et al. 2025, arXiv:2511.20347.
    """
    positive, negative = (inputs.ratio.new_full((), tau) for tau in (tau_positive, tau_negative))
    tau = torch.where(inputs.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (inputs.ratio - 1)) * (4 / tau)
    return SurrogateOutput(loss=gate * -inputs.advantages, ratio=inputs.ratio.detach())


@register_surrogate("gmpo")
def gmpo(inputs: SurrogateInputs, *, clip_low: float, clip_high: float) -> SurrogateOutput:
    """Geometric mean of the sequence's ratios, each clipped on the side its advantage pushes to.

    Formula: ``-A exp(mean_t(sgn(A) min(sgn(A) l_t, sgn(A) clip(l_t, -low, high))))``, A the sequence's mean.
    Zhao et al. 2025, arXiv:2507.20673. Every token carries its sequence's value, to be averaged over sequences.
    """
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    plain = log_ratio.detach()
    bounded = plain.clamp(-clip_low, clip_high)
    binding = plain * advantages > bounded * advantages
    selected = torch.where(advantages == 0, 0.0, torch.where(binding, bounded, log_ratio))
    loss = inputs.sequence_mean(selected).exp() * -inputs.sequence_mean(advantages)
    return SurrogateOutput(
        loss=loss.expand(log_ratio.shape),
        ratio=inputs.ratio.detach(),
        window=(math.exp(-clip_low), math.exp(clip_high)),
        clipped=(plain != bounded) & (advantages != 0),
    )
