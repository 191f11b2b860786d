"""Importance ratios p_curr / p_prev of a token or of a sequence."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_support.loss.layout import Layout
from megatron_support.loss.masks import on_cpu, value_range

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped into [-20, 20] (gradient 0 beyond), so a ratio is at most e^20 = 4.9e8 and never overflows."""


def bounded(log_ratio: Tensor, extremes: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The log-ratio clamped into [-20, 20], gradient 0 beyond.

    Args:
        log_ratio: any shape.
        extremes: its :func:`value_range` where that is at hand.
    """
    if on_cpu(log_ratio):
        low, high = value_range(log_ratio) if extremes is None else extremes
        if low >= -MAX_LOG_RATIO and high <= MAX_LOG_RATIO:  # as nearly always
            return log_ratio
    return _Bounded.apply(log_ratio)


class _Bounded(Function):
    """``clamp`` with a backward of one multiplication."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        clamped = values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ctx.save_for_backward(torch.eq(clamped, values, out=torch.empty_like(values)))
        return clamped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


def sequence_means(values: Tensor, counts: Tensor, layout: Layout) -> Tensor:
    """``[sequences]``: sum of each sequence's values over all its ranks / its count; 0 where the count is 0.

    Args:
        values: per token, 0 at tokens that do not take part.
        counts: float64 ``[sequences]``, over all context-parallel ranks.
        layout: sequences and ranks.
    """
    totals = layout.totals(layout.local_sums(values))
    return totals / torch.where(counts > 0, counts, 1.0).to(values.dtype)


def level_log_ratio(
    log_ratio: Tensor,
    counts: Tensor,
    layout: Layout,
    level: Literal["token", "sequence", "sequence_token"],
    extremes: tuple[Tensor, Tensor],
) -> Tensor:
    """The log-ratio that stands for each token.

    Formula: ``token``: l_t. ``sequence``: mean of l over the sequence's surviving tokens (GSPO).
    ``sequence_token``: sg(mean) + l_t - sg(l_t), the value of GSPO with the token's own gradient.
    GSPO: Zheng et al. 2025, arXiv:2507.18071.

    Args:
        log_ratio: per token, 0 at tokens that do not take part.
        counts: float64 ``[sequences]``, surviving tokens.
        layout: sequences and ranks.
        level: which.
        extremes: :func:`value_range` of ``log_ratio``.

    Returns:
        A tensor that broadcasts to the tokens, in [-20, 20].
    """
    if level == "token":
        return bounded(log_ratio, extremes)
    if level == "sequence":
        return layout.to_tokens(bounded(sequence_means(log_ratio, counts, layout))).expand(log_ratio.shape)
    mean = layout.to_tokens(bounded(sequence_means(log_ratio.detach(), counts, layout)))
    return mean + (log_ratio - log_ratio.detach())
