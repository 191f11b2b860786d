"""Diagnostics of one batch: detached sums and counts, each metric with its own reduction, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_support.loss.correction import CorrectionWeights
from megatron_support.loss.kl import KLType, kl_estimate
from megatron_support.loss.masks import Exclusions, as_float, count, select
from megatron_support.loss.participation import Participation
from megatron_support.loss.ratio import MAX_LOG_RATIO
from megatron_support.loss.surrogates import SurrogateOutput
from megatron_support.metrics import EffectiveSampleSize, Max, Mean, Metric, Min, Sum


def ratio_metrics(output: SurrogateOutput, log_ratio: Tensor, mask: Tensor, tokens: Tensor) -> dict[str, Metric]:
    """Ratio before and after clipping, clip fractions and mean(prev - curr).

    Args:
        output: of the surrogate.
        log_ratio: curr - prev per token, 0 where the mask is False.
        mask: bool, the actor mask.
        tokens: the count that divides token means.
    """
    clipped = output.ratio if output.clipped_ratio is None else output.clipped_ratio
    chosen = as_float(mask, output.ratio.dtype)
    absent = torch.where(mask, 0.0, torch.inf).to(output.ratio.dtype)
    metrics: dict[str, Metric] = {
        **_spread("probs_ratio", output.ratio, chosen, absent, tokens),
        **_spread("probs_ratio_clamped", clipped, chosen, absent, tokens),
        "approx_kl": Mean(-log_ratio.sum(), tokens, per="token"),
    }
    if output.clipped is not None:
        touched = output.clipped & mask
        above = count(touched & (output.ratio > 1))
        metrics["clip_fraction_low"] = Mean(count(touched) - above, tokens, per="token")
        metrics["clip_fraction_high"] = Mean(above, tokens, per="token")
    if output.bounded is not None:
        metrics["bound_fraction"] = Mean(count(output.bounded & mask), tokens, per="token")
    return metrics


def _spread(name: str, values: Tensor, chosen: Tensor, absent: Tensor, tokens: Tensor) -> dict[str, Metric]:
    """Mean, minimum and maximum; ``chosen`` is 1 and ``absent`` 0 at tokens that take part, 0 and inf elsewhere."""
    if values.numel() == 0:  # no reduction over nothing; the names must be those of every other rank
        empty = values.new_zeros(())
        return {
            name: Mean(empty, tokens, per="token"),
            f"{name}_min": Min(empty + torch.inf),
            f"{name}_max": Max(empty - torch.inf),
        }
    return {
        name: Mean((values * chosen).sum(), tokens, per="token"),
        f"{name}_min": Min((values + absent).amin()),
        f"{name}_max": Max((values - absent).amax()),
    }


def mismatch_metrics(
    log_weight: Tensor, weight: Tensor, mask: Tensor, tokens: Tensor, kl_type: KLType
) -> dict[str, Metric]:
    """How far the trainer's log-probabilities are from the inference engine's.

    Formulas, with d = prev - generation and w = e^d: ``logprob_error`` |d|; ``token_mult_prob_error`` e^|d|;
    ``gen_kl_error`` KL(generation || prev) and ``policy_kl_error`` KL(prev || generation), estimated from d and -d as
    in :func:`kl_estimate`; ``js_divergence_error`` log((1 + w) / 2) - d / 2; ``effective_sample_size`` of w.

    Args:
        log_weight: d per token, 0 where the mask is False.
        weight: e^d.
        mask: bool, the actor mask.
        tokens: the count that divides.
        kl_type: the estimator of the two divergences.
    """
    d = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inverse = weight.reciprocal()
    if kl_type == "k3":  # kl_estimate of d and -d, from the exponentials at hand
        from_generation, from_previous = (weight - 1) - d, (inverse - 1) + d
    else:
        from_generation, from_previous = kl_estimate(d, kl_type), kl_estimate(-d, kl_type)
    outside = mask.numel() - count(mask)  # each holds e^|0| = 1
    return {
        "logprob_error": Mean(d.abs().sum(), tokens, per="token"),
        "token_mult_prob_error": Mean(torch.maximum(weight, inverse).sum() - outside, tokens, per="token"),
        "gen_kl_error": Mean(from_generation.sum(), tokens, per="token"),
        "policy_kl_error": Mean(from_previous.sum(), tokens, per="token"),
        "js_divergence_error": Mean((torch.log1p(0.5 * (weight - 1)) - 0.5 * d).sum(), tokens, per="token"),
        "effective_sample_size": EffectiveSampleSize(
            weight.sum() - outside, weight.square().sum() - outside, count(mask)
        ),
    }


def weight_metrics(
    correction: CorrectionWeights, part: Participation, tokens: Tensor, sequences: Tensor
) -> dict[str, Metric]:
    """Mean correction weight, and the share of tokens (tis, icepop) or sequences (sequence_mask) out of the window."""
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
        outside = count(correction.out_of_bounds & part.actor_mask)
        metrics["is_oob_ratio"] = Mean(outside, tokens, per="token")
    if correction.masked_sequences is not None:
        outside = part.count_sequences(correction.masked_sequences)
        metrics["is_oob_ratio"] = Mean(outside, sequences, per="sequence")
    return metrics


def approx_entropy(curr_logprobs: Tensor, generation_logprobs: Tensor, tokens: Tensor) -> Metric:
    """Entropy of the current policy from generated tokens.

    Formula: mean of ``-(p / p_generation) log p``; both arguments are 0 where the mask is False.
    """
    weight = (curr_logprobs - generation_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return Mean(-(weight * curr_logprobs).sum(), tokens, per="token")


def exclusion_metrics(excluded: Exclusions, valid: Tensor, advantages: Tensor) -> dict[str, Metric]:
    """Where exclusion strikes: tokens by source, their share by advantage sign, and the share of |advantage| removed.

    Args:
        excluded: from :func:`exclusions`.
        valid: bool, response & sample mask.
        advantages: raw, per token.
    """
    if excluded.tokens is None:
        none = valid.new_zeros((), dtype=torch.int64)
        excluded = Exclusions(tokens=valid & False, current=None, previous=None, generation=None)
        by_source = dict.fromkeys(("current", "previous", "generation"), none)
    else:
        sources = {"current": excluded.current, "previous": excluded.previous, "generation": excluded.generation}
        by_source = {name: count(mask) for name, mask in sources.items() if mask is not None}
    assert excluded.tokens is not None
    known = select(valid, advantages)
    magnitude = known.abs()
    positive, negative = known > 0, known < 0
    return {
        **{f"excluded_by_{name}": Sum(total) for name, total in by_source.items()},
        "excluded_share_positive": Mean(count(excluded.tokens & positive), count(positive), per="positive token"),
        "excluded_share_negative": Mean(count(excluded.tokens & negative), count(negative), per="negative token"),
        "excluded_advantage_mass": Mean(
            select(excluded.tokens, magnitude).sum(), magnitude.sum(), per="absolute advantage"
        ),
    }
