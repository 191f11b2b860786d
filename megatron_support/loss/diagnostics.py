"""Diagnostics of one batch: detached sums and extremes, each metric with its own reduction, no host synchronisation.

Tokens are worked through in blocks, with few and reused intermediate tensors: on a CPU the cost is that of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_support.kl import KLType
from megatron_support.loss.correction import CorrectionWeights
from megatron_support.loss.masks import as_float, on_cpu, select
from megatron_support.loss.participation import Participation
from megatron_support.loss.ratio import MAX_LOG_RATIO
from megatron_support.metrics import EffectiveSampleSize, Max, Mean, Metric, Min, Scalar, Sum

BLOCK = 1 << 18
"""Tokens of a block on the CPU: 1 MiB of fp32. Smaller blocks cost more in calls than they save in cache misses."""

LOG2_E = math.log2(math.e)
_LARGEST_LOG = 80.0
"""e^80 and e^-80 are fp32 numbers with room to spare."""

Parts = dict[str, Tensor]
Sums = dict[str, Any]
"""By name, over all tokens: numbers, or 0-dimensional tensors."""


@dataclass(frozen=True, kw_only=True)
class DiagnosticTokens:
    """Flat per-token tensors, detached; log-probabilities and ``raw_advantages`` raw."""

    mask: Tensor
    """bool, the actor mask."""
    excluded: Tensor | None
    """bool, outside the support; None where filtering is inactive."""
    dropped: Tensor | None
    """bool, in the support and not in the actor mask: tokens of sequences that left. None where no rule drops any."""
    curr_logprobs: Tensor
    prev_logprobs: Tensor | None
    generation_logprobs: Tensor | None
    raw_advantages: Tensor
    advantages: Tensor
    """0 where the mask is False."""
    actor_logprobs: Tensor | None
    """curr, 0 where the mask is False; given with ``log_weight``."""
    log_ratio: Tensor
    """curr - prev per token, 0 where the mask is False."""
    log_weight: Tensor | None
    """prev - generation, 0 where the mask is False."""
    token_ratio: Tensor | None
    """exp(log_ratio) where it is at hand."""
    ratio: Tensor
    """As the surrogate reports it; finite where the mask is False."""
    clipped_ratio: Tensor | None
    """``ratio`` clipped into the window where it is at hand."""
    clipped: Tensor | None
    bounded: Tensor | None

    def blocks(self) -> Iterator[DiagnosticTokens]:
        """Flat slices of at most BLOCK tokens; on other devices, and while compiling, all tokens at once."""
        flat = {}
        for name in _TOKEN_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                flat[name] = tensor.reshape(-1)
        size = self.mask.numel()
        absent: dict[str, Any] = dict.fromkeys(_TOKEN_FIELDS)
        if size <= BLOCK or not on_cpu(self.mask):
            yield DiagnosticTokens(**absent | flat)
            return
        for start in range(0, size, BLOCK):
            yield DiagnosticTokens(**absent | {name: tensor[start : start + BLOCK] for name, tensor in flat.items()})


def _scalars(values: Tensor) -> Iterable[Any]:
    """The entries ``[K]``: as numbers, on which arithmetic costs nothing, where reading them waits for no device."""
    return values.tolist() if on_cpu(values) else values.unbind()


_TOKEN_FIELDS = tuple(f.name for f in fields(DiagnosticTokens))


def token_diagnostics(
    tokens: DiagnosticTokens,
    count: Tensor,
    *,
    log_ratio_range: tuple[Tensor, Tensor] | None,
    log_weight_range: tuple[Tensor, Tensor] | None,
    window: tuple[float, float] | None,
    pessimistic: bool,
    kl_type: KLType,
) -> tuple[dict[str, Metric], Scalar | None]:
    """All diagnostics that are sums over tokens.

    Args:
        tokens: of this rank.
        count: the count that divides token means.
        log_ratio_range: of ``tokens.log_ratio``, where ``token_ratio`` is its exponential.
        log_weight_range: of prev - generation, where that is given.
        window: bounds of the ratio; None for no clipping.
        pessimistic: see :class:`SurrogateOutput`.
        kl_type: the estimator of ``gen_kl_error`` and ``policy_kl_error``.

    Returns:
        The metrics, and the sum of exp(prev - generation) over surviving tokens, None where either is not given.
    """
    names: list[str] = []
    totals, lows, highs = [], [], []
    known = _known_extremes(tokens, log_ratio_range)
    farthest = _farthest(log_ratio_range), _farthest(log_weight_range)
    room: Tensor | None = None
    for block in tokens.blocks():
        if room is None or room.shape[1] != block.ratio.numel():
            room = _room(block.log_ratio)
        chosen = as_float(block.mask, block.curr_logprobs.dtype)
        sign, rest = torch.sign(block.advantages, out=room[0]), room[1:]
        parts = ratio_parts(block, chosen, sign, window, pessimistic, rest)
        parts |= exclusion_parts(block, sign, rest) | mismatch_parts(block, chosen, kl_type, farthest, rest)
        names = list(parts)
        totals.append(torch.stack(list(parts.values())))
        low, high = _extremes(block.ratio, chosen, rest) if known is None else known
        lows.append(low)
        highs.append(high)
    summed = torch.stack(totals).sum(dim=0, dtype=torch.float64)
    sums = dict(zip(names, _scalars(summed), strict=True))
    low, high = torch.stack(lows).amin(), torch.stack(highs).amax()
    metrics = _ratio_metrics(sums, low, high, count, window) | _exclusion_metrics(sums)
    if "weight" not in sums:
        return metrics, None
    return metrics | _mismatch_metrics(sums, count, kl_type), sums["weight"]


def _room(tokens: Tensor) -> Tensor:
    """``[4, T]`` for intermediate values; each row begins where sums are fast and exact: at a multiple of 64 bytes."""
    size = tokens.numel()
    return tokens.new_empty(4, -(-size // 16) * 16)[:, :size]


def _farthest(log_range: tuple[Tensor, Tensor] | None) -> float:
    """The largest |logarithm|; infinite where it is not given, or reading it would wait for a device."""
    if log_range is None or not on_cpu(log_range[0]):
        return math.inf
    low, high = map(float, log_range)
    return max(-low, high) if low <= high else math.inf  # NaN is neither


def ratio_parts(
    block: DiagnosticTokens,
    chosen: Tensor,
    sign: Tensor,
    window: tuple[float, float] | None,
    pessimistic: bool,
    room: Tensor,
) -> Parts:
    """Sums about the ratio and its clipping.

    Args:
        block: the tokens.
        chosen: the actor mask as 0 and 1.
        sign: of the advantages.
        window: bounds of the ratio.
        pessimistic: whether a clip above needs a positive advantage, and one below a negative one.
        room: ``[3, T]`` for intermediate values.
    """
    ratio, (a, b, _) = block.ratio, room
    parts = {"survivors": chosen.sum(), "log_ratio": block.log_ratio.sum(), "ratio": torch.dot(ratio, chosen)}
    if window is not None:
        clipped_ratio = block.clipped_ratio
        clipped_ratio = torch.clamp(ratio, *window, out=a) if clipped_ratio is None else clipped_ratio
        parts["clamped"] = torch.dot(clipped_ratio, chosen)
    if block.clipped is not None:
        clipped = block.clipped if block.clipped.is_floating_point() else as_float(block.clipped, ratio.dtype)
        if not pessimistic:
            clipped = torch.mul(clipped, chosen, out=a)
            sign = torch.gt(ratio, 1.0, out=b).mul_(2).sub_(1)
        parts["clipped"] = clipped.sum()
        parts["clipped_above_less_below"] = torch.dot(clipped, sign)
    if block.bounded is not None:
        parts["bounded"] = torch.dot(as_float(block.bounded, ratio.dtype), chosen)
    return parts


def _known_extremes(tokens: DiagnosticTokens, log_range: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """The smallest and largest ratio from those of its logarithm; None where they don't tell.

    A token that does not take part has the logarithm 0, which is neither where others lie on both sides of it.
    """
    ratio = tokens.token_ratio
    if log_range is None or ratio is None or not on_cpu(ratio) or ratio.data_ptr() != tokens.ratio.data_ptr():
        return None
    low, high = torch.stack(log_range).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (low.exp(), high.exp()) if low < 0 < high else None


def _extremes(ratio: Tensor, chosen: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest ratio of the tokens that take part; inf and -inf of none."""
    if ratio.numel() == 0:  # no extreme of nothing
        return ratio.new_full((), torch.inf), ratio.new_full((), -torch.inf)
    a, b, _ = room
    absent = torch.reciprocal(chosen, out=a).sub_(1)  # 0 at tokens that take part, inf elsewhere
    return torch.add(ratio, absent, out=b).amin(), torch.sub(ratio, absent, out=b).amax()


def _ratio_metrics(
    sums: Sums, low: Tensor, high: Tensor, count: Tensor, window: tuple[float, float] | None
) -> dict[str, Metric]:
    """Mean and extremes before and after clipping (clipping keeps the order, so it commutes with extremes)."""
    clamped, clamped_low, clamped_high = sums["ratio"], low, high
    if window is not None:
        clamped = sums["clamped"]
        clamped_low = torch.where(low == torch.inf, low, low.clamp(*window))
        clamped_high = torch.where(high == -torch.inf, high, high.clamp(*window))
    metrics: dict[str, Metric] = {
        "probs_ratio": Mean(sums["ratio"], count, per="token"),
        "probs_ratio_min": Min(low),
        "probs_ratio_max": Max(high),
        "probs_ratio_clamped": Mean(clamped, count, per="token"),
        "probs_ratio_clamped_min": Min(clamped_low),
        "probs_ratio_clamped_max": Max(clamped_high),
        "approx_kl": Mean(-sums["log_ratio"], count, per="token"),
    }
    if "clipped" in sums:
        clipped, difference = sums["clipped"], sums["clipped_above_less_below"]
        metrics["clip_fraction_low"] = Mean((clipped - difference) / 2, count, per="token")
        metrics["clip_fraction_high"] = Mean((clipped + difference) / 2, count, per="token")
    if "bounded" in sums:
        metrics["bound_fraction"] = Mean(sums["bounded"], count, per="token")
    return metrics


def exclusion_parts(block: DiagnosticTokens, sign: Tensor, room: Tensor) -> Parts:
    """Sums about excluded tokens, by source and by sign of the advantage, beside those of all valid tokens.

    Args:
        block: the tokens.
        sign: of the advantages.
        room: ``[3, T]`` for intermediate values.
    """
    parts = _advantage_sums("kept", block.advantages, sign)
    if block.dropped is not None:
        dropped = select(block.dropped, block.raw_advantages)
        parts |= _advantage_sums("dropped", dropped, torch.sign(dropped, out=room[0]))
    if block.excluded is None:
        return parts
    take = _entries_of(block.excluded)
    advantages = take(block.raw_advantages)
    parts |= _advantage_sums("excluded", advantages, torch.sign(advantages))
    sources = {"current": block.curr_logprobs, "previous": block.prev_logprobs, "generation": block.generation_logprobs}
    for name, values in sources.items():
        if values is not None:
            parts[f"excluded_by_{name}"] = (take(values) == -torch.inf).sum(dtype=advantages.dtype)
    return parts


def _entries_of(mask: Tensor) -> Callable[[Tensor], Tensor]:
    """``values`` -> those where the mask is True, few of many. Where gathering would wait for a device: all of them,
    with 0 in place of the others, which adds nothing to a sum."""
    if not on_cpu(mask):
        return lambda values: torch.where(mask, values, 0.0)
    index = torch.from_numpy(numpy.flatnonzero(mask.numpy()))
    return lambda values: values.index_select(0, index)


def _advantage_sums(of: str, advantages: Tensor, sign: Tensor) -> Parts:
    """Sums of |advantage|, of its sign, and of its sign's size."""
    sums = {"mass": torch.dot(advantages, sign), "sign": sign.sum(), "signed": torch.dot(sign, sign)}
    return {f"{of}_{name}": total for name, total in sums.items()}


def _exclusion_metrics(sums: Sums) -> dict[str, Metric]:
    """Share of tokens with a positive and a negative advantage that left, and the share of |advantage|."""
    size, sign, signed = (
        sum(sums.get(f"{of}_{name}", 0.0) for of in ("kept", "dropped", "excluded"))
        for name in ("mass", "sign", "signed")
    )
    gone_size, gone_sign, gone_signed = (sums.get(f"excluded_{name}", 0.0) for name in ("mass", "sign", "signed"))
    positive, negative = (signed + sign) / 2, (signed - sign) / 2
    gone_positive, gone_negative = (gone_signed + gone_sign) / 2, (gone_signed - gone_sign) / 2
    return {
        **{name: Sum(total) for name, total in sums.items() if name.startswith("excluded_by_")},
        "excluded_share_positive": Mean(gone_positive, positive, per="token with positive advantage"),
        "excluded_share_negative": Mean(gone_negative, negative, per="token with negative advantage"),
        "excluded_advantage_mass": Mean(gone_size, size, per="absolute advantage"),
    }


def mismatch_parts(
    block: DiagnosticTokens, chosen: Tensor, kl_type: KLType, farthest: tuple[float, float], room: Tensor
) -> Parts:
    """Sums of d = prev - generation and of w = e^d over surviving tokens.

    Args:
        block: the tokens.
        chosen: the actor mask as 0 and 1.
        kl_type: which sums are read.
        farthest: the largest |curr - prev| and |prev - generation|, or infinite.
        room: ``[3, T]`` for intermediate values.
    """
    if block.log_weight is None:
        return {}
    assert block.actor_logprobs is not None
    a, b, c = room
    d = block.log_weight
    if farthest[1] > MAX_LOG_RATIO:
        d = torch.clamp(d, -MAX_LOG_RATIO, MAX_LOG_RATIO, out=a)
    parts = {"d": d.sum(), "absolute": torch.abs(d, out=b).sum()}
    if kl_type == "k2":
        parts["squares"] = torch.dot(d, d)
    weight = torch.mul(d, LOG2_E, out=b).exp2_()  # e^d, in a third of the time of exp on some CPUs
    if block.token_ratio is None or sum(farthest) > MAX_LOG_RATIO:  # else no factor and no product is clamped
        to_generation = torch.add(block.log_ratio, block.log_weight, out=a)
        to_generation.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
    else:
        to_generation = torch.mul(block.token_ratio, weight, out=a)
    parts["entropy"] = torch.dot(to_generation, block.actor_logprobs)
    mixture = torch.add(weight.new_tensor(0.5), weight, alpha=0.5, out=a)
    bound = min(farthest[1], MAX_LOG_RATIO)  # of log((1 + w) / 2), which lies between 0 and d
    parts["mixture"] = _sum_of_logs(mixture, max(bound, 0.5))  # a few folds do: more would be calls, not work
    kept = torch.mul(weight, chosen, out=c)  # subtracting the others' ones from a sum would lose small weights
    parts["weight"] = kept.sum()
    parts["weight_squares"] = torch.dot(kept, kept)
    inverse = torch.reciprocal(weight, out=a).sub_(1)
    weight.sub_(1)
    if kl_type == "k3":  # less its ones, which would hide the difference from d
        parts["weight_excess"] = weight.sum()
        parts["inverse_excess"] = inverse.sum()
    parts["larger_excess"] = torch.maximum(weight, inverse, out=c).sum()
    return parts


def _sum_of_logs(values: Tensor, bound: float) -> Tensor:
    """``log(values).sum()`` for logarithms within [-bound, bound], with one for as many as have a finite product."""
    odd = []
    while 2 * bound <= _LARGEST_LOG and values.numel() > 1:
        half = values.numel() // 2
        odd += [values[2 * half :]] if values.numel() % 2 else []
        values = values[:half] * values[half : 2 * half]
        bound *= 2
    return torch.cat([values, *odd]).log().sum() if odd else values.log().sum()


def _mismatch_metrics(sums: Sums, count: Tensor, kl_type: KLType) -> dict[str, Metric]:
    """How far the trainer's log-probabilities are from the inference engine's.

    Formulas, with d = prev - generation and w = e^d: ``logprob_error`` |d|; ``token_mult_prob_error`` e^|d|;
    ``gen_kl_error`` KL(generation || prev) and ``policy_kl_error`` KL(prev || generation), estimated from d and -d as
    in :func:`kl_estimate`; ``js_divergence_error`` log((1 + w) / 2) - d / 2; ``approx_entropy``
    -(p / p_generation) log p; ``effective_sample_size`` of w.
    """
    n, d = sums["survivors"], sums["d"]
    squares, above, below = (sums.get(name, 0.0) for name in ("squares", "weight_excess", "inverse_excess"))
    generation, previous = {
        "k1": (-d, d),
        "k2": (0.5 * squares, 0.5 * squares),
        "k3": (above - d, below + d),
        "abs": (sums["absolute"], sums["absolute"]),
    }[kl_type]
    return {
        "logprob_error": Mean(sums["absolute"], count, per="token"),
        "token_mult_prob_error": Mean(sums["larger_excess"] + n, count, per="token"),
        "gen_kl_error": Mean(generation, count, per="token"),
        "policy_kl_error": Mean(previous, count, per="token"),
        "js_divergence_error": Mean(sums["mixture"] - 0.5 * d, count, per="token"),
        "approx_entropy": Mean(-sums["entropy"], count, per="token"),
        "effective_sample_size": EffectiveSampleSize(sums["weight"], sums["weight_squares"], n),
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
