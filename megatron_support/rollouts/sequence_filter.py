"""Masking whole sequences before training: log-probability errors between two engines, and truncated responses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_support.config.recipe import SequenceFilterConfig
from megatron_support.errors import RolloutError
from megatron_support.metrics import Max, Mean, MetricSet, Min, Sum
from megatron_support.rollouts.batch import RolloutBatch


def sequence_logprob_errors(
    prev_logprobs: Tensor,
    generation_logprobs: Tensor,
    response_mask: Tensor,
    *,
    sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
) -> Tensor:
    """Mean multiplicative probability error of each response: 1 where the two engines agree.

    Formula: mean over the masked tokens of ``exp|prev - generation|``. Strict: a NaN stays NaN and an infinity stays
    infinite, so neither is within any threshold.

    Args:
        prev_logprobs: the trainer's, ``[B, S]``, or flat ``[T]`` with ``sequence_ids``.
        generation_logprobs: the inference engine's, the same shape.
        response_mask: the same shape, any dtype.
        sequence_ids: int64 ``[T]``.
        num_sequences: with ``sequence_ids``: how many sequences; None for the largest id + 1.

    Returns:
        float64 ``[sequences]``; 0 for a response without a masked token, which has no error.

    Raises:
        RolloutError: shapes differ, or flat tokens carry no ids.
    """
    for name, value in (("generation_logprobs", generation_logprobs), ("response_mask", response_mask)):
        if value.shape != prev_logprobs.shape:
            raise RolloutError(
                f"{name} must have the shape of prev_logprobs {tuple(prev_logprobs.shape)}, got {tuple(value.shape)}; "
                "pass one entry per token"
            )
    mask = response_mask != 0
    difference = torch.where(mask, prev_logprobs.double() - generation_logprobs.double(), 0.0)
    errors = torch.where(mask, difference.abs().exp(), 0.0)
    counts = mask.double()
    if sequence_ids is None:
        if prev_logprobs.ndim != 2:
            raise RolloutError(
                f"prev_logprobs must be [B, S] without sequence_ids, got shape {tuple(prev_logprobs.shape)}; "
                "pass sequence_ids with flat tokens"
            )
        totals, counts = errors.sum(-1), counts.sum(-1)
    else:
        if num_sequences is None:
            num_sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
        zeros = errors.new_zeros(num_sequences)
        totals = zeros.index_add(0, sequence_ids.reshape(-1), errors.reshape(-1))
        counts = zeros.index_add(0, sequence_ids.reshape(-1), counts.reshape(-1))
    return totals / torch.where(counts > 0, counts, 1.0)


@dataclass(frozen=True, kw_only=True)
class FilterResult:
    """What :func:`filter_sequences` returns."""

    rollouts: RolloutBatch
    """The batch with ``sample_mask`` cleared for rejected sequences."""
    rejected: Tensor
    """bool ``[S]``."""
    errors: Tensor
    """float64 ``[S]``; 0 for a response without a token to compare."""
    metrics: MetricSet
    """rejected_sequences, rejected_share_correct, and the extremes of the error before and after."""


def filter_sequences(rollouts: RolloutBatch, *, threshold: float) -> FilterResult:
    """Mask sequences whose log-probabilities differ too much between the trainer and the inference engine.

    A token whose log-probability is -inf in either engine while its sequence was sampled under a filter leaves the
    mean: it is outside the support, not wrong. NaN, +inf, and -inf without a filter stay in and fail any threshold. A
    response with no token left has no error and is not rejected.

    Args:
        rollouts: with ``prev_logprobs`` and ``generation_logprobs``.
        threshold: largest accepted mean of exp|prev - generation|, >= 1.

    Raises:
        RolloutError: a column is missing, or the threshold is below 1.
    """
    if not threshold >= 1:
        raise RolloutError(
            f"threshold must be >= 1, as exp|difference| is at least 1, got {threshold}; raise it, e.g. to 1.5"
        )
    prev, generation = rollouts.prev_logprobs, rollouts.generation_logprobs
    for name in ("prev_logprobs", "generation_logprobs"):
        if getattr(rollouts, name) is None:
            raise RolloutError(f"the sequence filter needs the column {name}, got a batch without it; add the column")
    assert prev is not None and generation is not None
    # As in the loss: -inf next to a NaN or +inf is a fault, whose sum is NaN, and stays in.
    outside = rollouts.filtering[rollouts.sequence_ids] & (prev + generation == -torch.inf)
    errors = sequence_logprob_errors(
        prev,
        generation,
        rollouts.response_mask & ~outside,
        sequence_ids=rollouts.sequence_ids,
        num_sequences=rollouts.num_sequences,
    )
    measured = rollouts.sample_mask & (errors != 0)
    rejected = measured & ~(errors <= threshold)  # a NaN is not within the threshold
    kept = measured & ~rejected
    correct = rejected & (rollouts.rewards > 0)
    metrics = MetricSet(
        {
            "rejected_sequences": Sum(rejected.sum()),
            "rejected_share_correct": Mean(correct.sum(), rejected.sum(), per="rejected sequence"),
            "sequence_error_min_before": Min(_extreme(errors, measured, torch.inf).amin()),
            "sequence_error_max_before": Max(_extreme(errors, measured, -torch.inf).amax()),
            "sequence_error_min_after": Min(_extreme(errors, kept, torch.inf).amin()),
            "sequence_error_max_after": Max(_extreme(errors, kept, -torch.inf).amax()),
        }
    )
    return FilterResult(
        rollouts=replace(rollouts, sample_mask=rollouts.sample_mask & ~rejected),
        rejected=rejected,
        errors=errors,
        metrics=metrics,
    )


def _extreme(errors: Tensor, chosen: Tensor, absent: float) -> Tensor:
    """Errors of the chosen sequences, ``absent`` elsewhere, and one ``absent`` more so that there is an extreme."""
    values = torch.where(chosen, errors, absent)
    return torch.cat([values, values.new_full((1,), absent)])


def mask_long_responses(
    rollouts: RolloutBatch, *, max_response_tokens: int | None = None, truncated: Tensor | None = None
) -> RolloutBatch:
    """The batch without the responses that did not end: their reward says nothing about the answer.

    Args:
        rollouts: a batch.
        max_response_tokens: the generation limit; a response of that many tokens or more counts as truncated.
        truncated: bool ``[S]``, the engine's own word for it.

    Raises:
        RolloutError: neither is given, or a value breaks its rule.
    """
    if max_response_tokens is None and truncated is None:
        raise RolloutError("max_response_tokens or truncated must be given, got neither; pass one of them")
    long = torch.zeros_like(rollouts.sample_mask)
    if max_response_tokens is not None:
        if max_response_tokens < 1:
            raise RolloutError(f"max_response_tokens must be >= 1, got {max_response_tokens}; use the generation limit")
        lengths = torch.zeros(rollouts.num_sequences, dtype=torch.int64)
        lengths.index_add_(0, rollouts.sequence_ids, rollouts.response_mask.long())
        long = long | (lengths >= max_response_tokens)
    if truncated is not None:
        if truncated.shape != rollouts.sample_mask.shape:
            raise RolloutError(
                f"truncated must have one entry per sequence, {rollouts.num_sequences}, got {tuple(truncated.shape)}; "
                "pass it per sequence"
            )
        long = long | (truncated != 0)
    return replace(rollouts, sample_mask=rollouts.sample_mask & ~long)


def mask_cut_off(rollouts: RolloutBatch, config: SequenceFilterConfig) -> tuple[RolloutBatch, MetricSet]:
    """:func:`mask_long_responses` where a recipe says so; counted by ``long_responses``."""
    if config.max_response_tokens is None:
        return rollouts, MetricSet()
    masked = mask_long_responses(rollouts, max_response_tokens=config.max_response_tokens)
    return masked, MetricSet({"long_responses": Sum((rollouts.sample_mask & ~masked.sample_mask).sum())})


def filter_errors(rollouts: RolloutBatch, config: SequenceFilterConfig) -> tuple[RolloutBatch, MetricSet]:
    """:func:`filter_sequences` where a recipe says so, with its metrics.

    Raises:
        RolloutError: a column is missing.
    """
    if config.max_logprob_error is None:
        return rollouts, MetricSet()
    result = filter_sequences(rollouts, threshold=config.max_logprob_error)
    return result.rollouts, result.metrics
