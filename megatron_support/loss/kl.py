"""KL divergence to the reference policy, estimated from the sampled token."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_support.kl import KLType, kl_estimate
from megatron_support.loss.ratio import MAX_LOG_RATIO


def reference_kl(
    curr_logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    kind: KLType,
    input_clamp: float | None,
    output_clamp: float | None,
    generation_logprobs: Tensor | None = None,
    generation_in_support: Tensor | None = None,
) -> Tensor:
    """Per-token KL penalty with the gradient of the divergence itself.

    Formula: ``clamp(w k(clamp(log p_ref - log p)))`` with w = p / sg(p), whose value is 1 and whose gradient is the
    score function (Tang & Munos 2025, arXiv:2506.09477); on policy w = p / p_generation.

    Args:
        curr_logprobs: unfiltered, sanitised under the KL mask.
        reference_logprobs: unfiltered, sanitised under the KL mask.
        kind: the estimator.
        input_clamp: bound of |log p_ref - log p|; where it applies w carries no gradient either.
        output_clamp: bound of |w k|.
        generation_logprobs: on policy only, sanitised, finite.
        generation_in_support: on policy only, bool; w is 0 where False.
    """
    log_ratio = reference_logprobs - curr_logprobs
    scored = curr_logprobs
    if input_clamp is not None:
        clamped = log_ratio.detach().abs() > input_clamp
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
        scored = torch.where(clamped, curr_logprobs.detach(), curr_logprobs)
    base = curr_logprobs.detach() if generation_logprobs is None else generation_logprobs
    weight = (scored - base).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if generation_in_support is not None:
        weight = torch.where(generation_in_support, weight, 0.0)
    kl = weight * kl_estimate(log_ratio, kind)
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)
