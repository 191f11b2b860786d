"""KL and distillation terms that come from previous log-probabilities: 0 at tokens outside the support."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_support.errors import LogprobFault
from megatron_support.kl import KLType, kl_estimate


def outside_support(prev_logprobs: Tensor, mask: Tensor, filtered: Tensor | bool, sequence_ids: Tensor) -> Tensor:
    """bool ``[N]``: response tokens whose previous log-probability is -inf while filtering is active.

    Args:
        prev_logprobs: ``[N]``, under the filter.
        mask: bool ``[N]``, response tokens of sequences that count.
        filtered: bool, or bool ``[N]``.
        sequence_ids: int64 ``[N]``, for messages.

    Raises:
        LogprobFault: one under the mask is NaN, +inf, or -inf without a filter.
    """
    active = filtered if isinstance(filtered, Tensor) else torch.full_like(mask, bool(filtered))
    outside = mask & active & (prev_logprobs == -torch.inf)
    wrong = (mask & ~outside & ~torch.isfinite(prev_logprobs)).nonzero().reshape(-1)
    if wrong.numel():
        first = int(wrong[0])
        raise LogprobFault(
            f"prev_logprobs at token {first} of sequence {int(sequence_ids[first])} is {float(prev_logprobs[first])}, "
            "it must be finite, or -inf for a token outside the support of an active sampling filter; "
            "check the previous pass"
        )
    return outside


def kl_in_reward(
    prev_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    outside: Tensor,
    *,
    coef: float,
    kind: KLType,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Tensor:
    """The penalty to take off each token's reward.

    Formula: ``coef * clamp(k(clamp(log p_ref - log p_prev)))`` at response tokens in the support, 0 elsewhere.

    Args:
        prev_logprobs: ``[N]``, unfiltered where available.
        reference_logprobs: ``[N]``, unfiltered.
        mask: bool ``[N]``, response tokens.
        outside: bool ``[N]``, tokens outside the support.
        coef: strength.
        kind: estimator.
        input_clamp, output_clamp: bounds of the log-ratio and of the estimate; None for none.
    """
    log_ratio = torch.where(mask & ~outside, reference_logprobs.double() - prev_logprobs.double(), 0.0)
    if input_clamp is not None:
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
    kl = kl_estimate(log_ratio, kind)
    if output_clamp is not None:
        kl = kl.clamp(-output_clamp, output_clamp)
    return coef * kl
