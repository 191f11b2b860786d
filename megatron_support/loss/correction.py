"""Behaviour-policy correction: weights exp(prev - generation) for tokens that another engine sampled. Detached."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_support.loss.layout import Layout
from megatron_support.loss.ratio import MAX_LOG_RATIO, sequence_means

CorrectionType = Literal["full", "tis", "icepop", "sequence_mask"]


@dataclass(frozen=True, kw_only=True)
class CorrectionWeights:
    """Weights that broadcast to the tokens, and which of them the window touched. Nothing carries gradient."""

    weights: Tensor
    per_sequence: Tensor | None = None
    """``[sequences]``, the same weights where they belong to sequences; None where they belong to tokens."""
    out_of_bounds: Tensor | None = None
    """bool, broadcasts to the tokens (tis, icepop)."""
    masked_sequences: Tensor | None = None
    """bool ``[sequences]`` (sequence_mask)."""


def behaviour_weights(log_weight: Tensor, layout: Layout, *, per_sequence: bool) -> Tensor:
    """exp(prev - generation) of a token, or its product over a sequence's surviving tokens ``[sequences]``.

    The exponent is clamped into [-20, 20].

    Args:
        log_weight: prev - generation, 0 at tokens that do not take part.
        layout: sequences and ranks.
        per_sequence: product over the sequence (sequence ratios).
    """
    log_weight = log_weight.detach()
    if per_sequence:
        log_weight = layout.totals(layout.local_sums(log_weight))
    return log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def correct(
    log_weight: Tensor,
    counts: Tensor,
    layout: Layout,
    *,
    kind: CorrectionType,
    per_sequence: bool,
    low: float = 0.0,
    high: float = math.inf,
) -> CorrectionWeights:
    """Weights for a loss whose tokens were sampled by the generation policy.

    Formula, with w = exp(prev - generation) of the token or the product over its sequence: ``full`` w; ``tis``
    clip(w, low, high) (Ionides 2008); ``icepop`` w where low <= w <= high, else 0 (2025); ``sequence_mask`` w where
    the geometric mean of the sequence's token weights is in [low, high], else 0.

    Args:
        log_weight: prev - generation, 0 at tokens that do not take part.
        counts: float64 ``[sequences]``, surviving tokens.
        layout: sequences and ranks.
        kind: the window's effect.
        per_sequence: whether weights belong to sequences.
        low, high: the window; not read by ``full``.
    """
    weights = behaviour_weights(log_weight, layout, per_sequence=per_sequence)
    outside = masked = None
    if kind in ("tis", "icepop"):
        outside = (weights < low) | (weights > high)
        weights = weights.clamp(low, high) if kind == "tis" else torch.where(outside, 0.0, weights)
        outside = layout.to_tokens(outside) if per_sequence else outside
    elif kind == "sequence_mask":
        mean = sequence_means(log_weight.detach(), counts, layout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        masked = ((mean < low) | (mean > high)) & (counts > 0)
        weights = torch.where(masked if per_sequence else layout.to_tokens(masked), 0.0, weights)
    return CorrectionWeights(
        weights=layout.to_tokens(weights) if per_sequence else weights,
        per_sequence=weights if per_sequence else None,
        out_of_bounds=outside,
        masked_sequences=masked,
    )
