"""Which sequence a token belongs to: the one place that knows rows from flat tokens and one rank from several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SequenceSum = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tokens as rows ``[B, S]`` (a row is a sequence) or flat ``[T]`` with a sequence id each."""

    shape: torch.Size
    """Of every per-token tensor."""
    num_sequences: int
    sequence_ids: Tensor | None = None
    """int64 ``[T]``; None for rows."""
    sequence_sum: SequenceSum | None = None
    """Sums ``[sequences]`` or ``[sequences, K]`` over context-parallel ranks, differentiably; None for one rank."""

    def local_sums(self, values: Tensor) -> Tensor:
        """Per-sequence sums ``[sequences]`` over this rank's tokens."""
        if self.sequence_ids is None:
            return values.sum(dim=-1)
        return values.new_zeros(self.num_sequences).index_add(0, self.sequence_ids, values)

    def totals(self, local: Tensor) -> Tensor:
        """Per-sequence sums ``[sequences]`` or ``[sequences, K]`` of all context-parallel ranks."""
        return local if self.sequence_sum is None else self.sequence_sum(local)

    def to_tokens(self, per_sequence: Tensor) -> Tensor:
        """``[sequences]`` as seen by each token; for rows ``[B, 1]``, which broadcasts."""
        if self.sequence_ids is None:
            return per_sequence.unsqueeze(-1)
        return per_sequence.index_select(0, self.sequence_ids)
