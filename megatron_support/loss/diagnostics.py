"""Diagnostics of one batch: detached sums and extremes, each metric with its own reduction, no host synchronisation.

Tokens are worked through in blocks: on a CPU the many intermediate values then stay in its cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_support.kl import KLType
from megatron_support.loss.correction import CorrectionWeights
from megatron_support.loss.masks import Selection, as_float, select
from megatron_support.loss.participation import Participation
from megatron_support.loss.ratio import MAX_LOG_RATIO
from megatron_support.metrics import EffectiveSampleSize, Max, Mean, Metric, Min, Sum

BLOCK = 1 << 15
"""Tokens of a block on the CPU: 128 KiB of fp32."""

Parts = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class DiagnosticTokens:
    """Flat per-token tensors, detached; log-probabilities and advantages raw."""

    mask: Tensor
    """bool, the actor mask."""
    valid: Tensor
    """bool, response & sample mask."""
    excluded: Tensor | None
    candidates: Tensor | None
    """bool, valid tokens where filtering is active."""
    curr_logprobs: Tensor
    prev_logprobs: Tensor | None
    generation_logprobs: Tensor | None
    advantages: Tensor
    ratio: Tensor
    """As the surrogate reports it; finite where the mask is False."""
    clipped: Tensor | None
    bounded: Tensor | None

    def blocks(self) -> Iterator[DiagnosticTokens]:
        """Slices of at most BLOCK tokens; on other devices, and while compiling, all tokens at once."""
        total = self.mask.numel()
        whole = self.mask.device.type != "cpu" or torch.compiler.is_compiling()
        size = total if whole or total == 0 else BLOCK
        for start in range(0, max(total, 1), max(size, 1)):
            yield self._slice(start, start + size)

    def _slice(self, start: int, stop: int) -> DiagnosticTokens:
        values: dict[str, Any] = {}
        for name in _TOKEN_FIELDS:
            tensor = getattr(self, name)
            values[name] = None if tensor is None else tensor.reshape(-1)[start:stop]
        return DiagnosticTokens(**values)


_TOKEN_FIELDS = tuple(f.name for f in fields(DiagnosticTokens))


def token_diagnostics(
    tokens: DiagnosticTokens,
    count: Tensor,
    *,
    window: tuple[float, float] | None,
    kl_type: KLType,
) -> tuple[dict[str, Metric], Tensor | None]:
    """All diagnostics that are sums over tokens.

    Args:
        tokens: of this rank.
        count: the count that divides token means.
        window: bounds of the ratio; None for no clipping.
        kl_type: the estimator of ``gen_kl_error`` and ``policy_kl_error``.

    Returns:
        The metrics, and the sum of exp(prev - generation) over surviving tokens, None where either is not given.
    """
    names: list[str] = []
    totals, lows, highs = [], [], []
    for block in tokens.blocks():
        chosen = as_float(block.mask, block.curr_logprobs.dtype)
        parts, low, high = ratio_parts(block, chosen, window)
        parts |= exclusion_parts(block) | mismatch_parts(block)
        names = list(parts)
        totals.append(torch.stack(list(parts.values())))
        lows.append(low)
        highs.append(high)
    summed = torch.stack(totals).sum(dim=0, dtype=torch.float64)
    sums = dict(zip(names, summed.unbind(), strict=True))
    low, high = torch.stack(lows).amin(), torch.stack(highs).amax()
    metrics = _ratio_metrics(sums, low, high, count, window) | _exclusion_metrics(sums)
    if "weight" not in sums:
        return metrics, None
    return metrics | _mismatch_metrics(sums, count, kl_type), sums["weight"] + sums["survivors"]


def ratio_parts(
    block: DiagnosticTokens, chosen: Tensor, window: tuple[float, float] | None
) -> tuple[Parts, Tensor, Tensor]:
    """Sums about the ratio and its clipping, and the smallest and largest ratio (inf and -inf over no token)."""
    ratio = block.ratio.reshape(-1)
    parts = {"survivors": chosen.sum(), "ratio": torch.dot(ratio, chosen)}
    if window is not None:
        parts["clamped"] = torch.dot(ratio.clamp(*window), chosen)
    if block.prev_logprobs is not None:
        parts["divergence"] = select(block.mask, block.prev_logprobs - block.curr_logprobs).sum()
    if block.clipped is not None:
        touched = as_float(block.clipped & block.mask, ratio.dtype)
        parts["clipped"] = touched.sum()
        parts["clipped_above"] = torch.dot(touched, torch.gt(ratio, 1.0, out=torch.empty_like(ratio)))
    if block.bounded is not None:
        parts["bounded"] = as_float(block.bounded & block.mask, ratio.dtype).sum()
    if ratio.numel() == 0:  # no extreme of nothing
        return parts, ratio.new_full((), torch.inf), ratio.new_full((), -torch.inf)
    absent = chosen.reciprocal() - 1  # 0 at tokens that take part, inf elsewhere
    return parts, (ratio + absent).amin(), (ratio - absent).amax()


def _ratio_metrics(
    sums: Parts, low: Tensor, high: Tensor, count: Tensor, window: tuple[float, float] | None
) -> dict[str, Metric]:
    """Mean and extremes before and after clipping (clipping keeps the order, so it commutes with extremes)."""
    clamped, clamped_low, clamped_high = sums["ratio"], low, high
    if window is not None:
        seen = sums["survivors"] > 0
        clamped = sums["clamped"]
        clamped_low = torch.where(seen, low.clamp(*window), low)
        clamped_high = torch.where(seen, high.clamp(*window), high)
    metrics: dict[str, Metric] = {
        "probs_ratio": Mean(sums["ratio"], count, per="token"),
        "probs_ratio_min": Min(low),
        "probs_ratio_max": Max(high),
        "probs_ratio_clamped": Mean(clamped, count, per="token"),
        "probs_ratio_clamped_min": Min(clamped_low),
        "probs_ratio_clamped_max": Max(clamped_high),
    }
    if "divergence" in sums:
        metrics["approx_kl"] = Mean(sums["divergence"], count, per="token")
    if "clipped" in sums:
        metrics["clip_fraction_low"] = Mean(sums["clipped"] - sums["clipped_above"], count, per="token")
        metrics["clip_fraction_high"] = Mean(sums["clipped_above"], count, per="token")
    if "bounded" in sums:
        metrics["bound_fraction"] = Mean(sums["bounded"], count, per="token")
    return metrics


def exclusion_parts(block: DiagnosticTokens) -> Parts:
    """Sums about excluded tokens: by source, by sign of the advantage, and |advantage|."""
    known = select(block.valid, block.advantages)
    sign, size = known.sign(), known.abs()
    parts = {"sign": sign.sum(), "signed": torch.dot(sign, sign), "mass": size.sum()}
    if block.excluded is None or block.candidates is None:
        return parts
    excluded = as_float(block.excluded, known.dtype)
    candidates = as_float(block.candidates, known.dtype)
    parts["excluded_sign"] = torch.dot(sign, excluded)
    parts["excluded_signed"] = torch.dot(sign.abs(), excluded)
    parts["excluded_mass"] = torch.dot(size, excluded)
    sources = {
        "current": block.curr_logprobs,
        "previous": block.prev_logprobs,
        "generation": block.generation_logprobs,
    }
    for name, values in sources.items():
        if values is not None:
            outside = torch.eq(values, -torch.inf, out=torch.empty_like(known))
            parts[f"excluded_by_{name}"] = torch.dot(outside, candidates)
    return parts


def _exclusion_metrics(sums: Parts) -> dict[str, Metric]:
    """Share of tokens with a positive and a negative advantage that left, and the share of |advantage|."""
    zero = torch.zeros_like(sums["sign"])
    sign, signed = sums.get("excluded_sign", zero), sums.get("excluded_signed", zero)
    positive, negative = (sums["signed"] + sums["sign"]) / 2, (sums["signed"] - sums["sign"]) / 2
    return {
        **{name: Sum(total) for name, total in sums.items() if name.startswith("excluded_by_")},
        "excluded_share_positive": Mean((signed + sign) / 2, positive, per="token with positive advantage"),
        "excluded_share_negative": Mean((signed - sign) / 2, negative, per="token with negative advantage"),
        "excluded_advantage_mass": Mean(sums.get("excluded_mass", zero), sums["mass"], per="absolute advantage"),
    }


def mismatch_parts(block: DiagnosticTokens) -> Parts:
    """Sums of d = prev - generation and of w = e^d over surviving tokens; the 1 of an exponential is left out."""
    if block.prev_logprobs is None or block.generation_logprobs is None:
        return {}
    selection = Selection(block.mask)
    d = selection(block.prev_logprobs - block.generation_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = d.exp()
    inverse = weight.reciprocal() - 1
    weight = weight - 1
    curr = selection(block.curr_logprobs)
    entropy = (curr - selection(block.generation_logprobs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "d": d.sum(),
        "absolute": d.abs().sum(),
        "squares": torch.dot(d, d),
        "weight": weight.sum(),
        "inverse": inverse.sum(),
        "larger": torch.maximum(weight, inverse).sum(),
        "weight_squares": torch.dot(weight, weight),
        "mixture": torch.log1p(0.5 * weight).sum(),
        "entropy": torch.dot(entropy, curr),
    }


def _mismatch_metrics(sums: Parts, count: Tensor, kl_type: KLType) -> dict[str, Metric]:
    """How far the trainer's log-probabilities are from the inference engine's.

    Formulas, with d = prev - generation and w = e^d: ``logprob_error`` |d|; ``token_mult_prob_error`` e^|d|;
    ``gen_kl_error`` KL(generation || prev) and ``policy_kl_error`` KL(prev || generation), estimated from d and -d as
    in :func:`kl_estimate`; ``js_divergence_error`` log((1 + w) / 2) - d / 2; ``approx_entropy``
    -(p / p_generation) log p; ``effective_sample_size`` of w.
    """
    n, d, weight = sums["survivors"], sums["d"], sums["weight"]
    generation, previous = {
        "k1": (-d, d),
        "k2": (0.5 * sums["squares"], 0.5 * sums["squares"]),
        "k3": (weight - d, sums["inverse"] + d),
        "abs": (sums["absolute"], sums["absolute"]),
    }[kl_type]
    return {
        "logprob_error": Mean(sums["absolute"], count, per="token"),
        "token_mult_prob_error": Mean(sums["larger"] + n, count, per="token"),
        "gen_kl_error": Mean(generation, count, per="token"),
        "policy_kl_error": Mean(previous, count, per="token"),
        "js_divergence_error": Mean(sums["mixture"] - 0.5 * d, count, per="token"),
        "approx_entropy": Mean(-sums["entropy"], count, per="token"),
        "effective_sample_size": EffectiveSampleSize(weight + n, sums["weight_squares"] + 2 * weight + n, n),
    }


def weight_metrics(
    correction: CorrectionWeights, part: Participation, tokens: Tensor, sequences: Tensor
) -> dict[str, Metric]:
    """Mean correction weight, and the share of tokens (tis, icepop) or sequences (sequence_mask) out of the window.

    Args:
        correction: the weights.
        part: masks and counts.
        tokens, sequences: the counts that divide.
    """
    metrics: dict[str, Metric] = {}
    if correction.per_sequence is not None:
        present = part.valid_counts > 0
        chosen = present if part.owned is None else present & part.owned
        total = select(chosen, correction.per_sequence).sum()
        metrics["sampling_importance_ratio"] = Mean(total, sequences, per="sequence")
    else:
        total = select(part.actor_mask, correction.weights).sum()
        metrics["sampling_importance_ratio"] = Mean(total, tokens, per="token")
    if correction.out_of_bounds is not None:
        outside = torch.count_nonzero(correction.out_of_bounds & part.actor_mask)
        metrics["is_oob_ratio"] = Mean(outside, tokens, per="token")
    if correction.masked_sequences is not None:
        outside = part.count_sequences(correction.masked_sequences)
        metrics["is_oob_ratio"] = Mean(outside, sequences, per="sequence")
    return metrics
