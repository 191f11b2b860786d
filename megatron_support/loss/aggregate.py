"""From a loss per token to one number: a local sum, divided once by a global count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_support.loss.layout import Layout

AggregationType = Literal["token_mean", "token_sum", "sequence_mean", "sequence_mean_token_sum", "dr_grpo"]
Count = int | float | Tensor


@dataclass(frozen=True, kw_only=True)
class Counts:
    """int64 scalars on this rank."""

    valid_tokens: Tensor
    valid_sequences: Tensor
    surviving_tokens: Tensor
    surviving_sequences: Tensor


def local_sum(
    values: Tensor, counts: Tensor, layout: Layout, *, kind: AggregationType, max_length: int | None = None
) -> Tensor:
    """This rank's numerator.

    Formula: ``sum_t w_t v_t`` with w = 1 (token_mean, token_sum, sequence_mean_token_sum), 1 / n_sequence
    (sequence_mean) or 1 / L (dr_grpo).

    Args:
        values: per token, 0 at tokens that do not take part.
        counts: float64 ``[sequences]``, tokens that take part, over all context-parallel ranks.
        layout: sequences and ranks.
        kind: the aggregation.
        max_length: L of dr_grpo.
    """
    if kind == "sequence_mean":
        divisor = torch.where(counts > 0, counts, 1.0).to(values.dtype)
        return (layout.local_sums(values) / divisor).sum()
    total = values.sum()
    if kind == "dr_grpo":
        assert max_length is not None
        return total / max_length
    return total


def denominator(
    counts: Counts,
    *,
    kind: AggregationType,
    survivors: bool,
    global_valid_tokens: Count | None = None,
    global_valid_sequences: Count | None = None,
) -> Count:
    """The one count that divides every term; a count of 0 becomes 1, as its numerator is 0.

    Args:
        counts: of this batch, used where no global count is given.
        kind: the aggregation.
        survivors: after exclusion; where nothing survived, before it.
        global_valid_tokens, global_valid_sequences: counts over all ranks; 1 leaves a sum.
    """
    if kind == "token_sum":
        return 1
    by_token = kind == "token_mean"
    given = global_valid_tokens if by_token else global_valid_sequences
    if given is not None:
        return at_least_one(given)
    before = counts.valid_tokens if by_token else counts.valid_sequences
    after = counts.surviving_tokens if by_token else counts.surviving_sequences
    return at_least_one(torch.where(after > 0, after, before) if survivors else before)


def at_least_one(value: Count) -> Count:
    """The count, or 1 where it is 0."""
    if isinstance(value, Tensor):
        return torch.where(value > 0, value, torch.ones_like(value))
    return value if value > 0 else 1
