"""Where slime's response tokens are in a rank's logits, and the support that the engine recorded for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_support.distributed.groups import ParallelGroups
from megatron_support.types import RolloutSupport


@dataclass(frozen=True, kw_only=True)
class LocalTokens:
    """Response tokens of a microbatch on this rank, R in all, in slime's order."""

    rows: Tensor
    """int64 ``[R]``, which row of the logits predicts each."""
    targets: Tensor
    """int64 ``[T]``, by row; -1 where a row predicts no response token."""
    sequence_ids: Tensor
    """int64 ``[R]``, sample of each."""
    index: Tensor
    """int64 ``[R]``, position of each in its response."""
    counts: tuple[int, ...]
    """Tokens of each sample here."""

    def cut(self, per_response: Sequence[Tensor]) -> Tensor:
        """``[R]`` from one tensor per sample over its whole response."""
        starts = [0]
        for values in per_response:
            starts.append(starts[-1] + len(values))
        offsets = torch.tensor(starts[:-1], device=self.index.device)
        return torch.cat(list(per_response)).to(self.index.device)[offsets[self.sequence_ids] + self.index]


def local_tokens(
    tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    num_rows: int,
    groups: ParallelGroups,
) -> LocalTokens:
    """Where the response tokens of each sample are in this rank's logits.

    Without context parallelism samples lie end to end. With C ranks each sample is padded to 2C chunks, of which rank
    r holds r and 2C - 1 - r. Row p of a sample predicts token p + 1.

    Args:
        tokens: prompt and response of each sample.
        total_lengths, response_lengths: their lengths.
        num_rows: rows of the logits, padding included.
        groups: the ranks' layout.
    """
    device = tokens[0].device
    size, rank = groups.context_size, groups.context_rank
    rows, ids, index, targets = [], [], [], torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    start = 0
    for sample, (row, total, response) in enumerate(zip(tokens, total_lengths, response_lengths, strict=True)):
        if size == 1:
            positions = torch.arange(total, device=device)
        else:
            chunk = -(-total // (2 * size))
            first = torch.arange(chunk, device=device)
            positions = torch.cat([first + rank * chunk, first + (2 * size - 1 - rank) * chunk])
        predicts = (positions >= total - response - 1) & (positions >= 0) & (positions < total - 1)
        here = predicts.nonzero().flatten()
        targets[start + here] = row[positions[here] + 1]
        rows.append(start + here)
        ids.append(torch.full_like(here, sample))
        index.append(positions[here] + 1 - (total - response))
        start += positions.numel()
    return LocalTokens(
        rows=torch.cat(rows),
        targets=targets,
        sequence_ids=torch.cat(ids),
        index=torch.cat(index),
        counts=tuple(len(row) for row in rows),
    )


def replayed_support(
    local: LocalTokens, token_ids: Sequence[Any], offsets: Sequence[Any], num_rows: int
) -> RolloutSupport:
    """slime's rollout top-p sets (CSR per sample over its response) by row of the logits.

    Args:
        local: the microbatch's tokens.
        token_ids, offsets: per sample, ids ``[N]`` and offsets ``[response + 1]``, lists or tensors.
        num_rows: rows of the logits.
    """
    device = local.rows.device
    ids = [torch.as_tensor(value, dtype=torch.int64, device=device) for value in token_ids]
    bounds = [torch.as_tensor(value, dtype=torch.int64, device=device) for value in offsets]
    lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
    lengths[local.rows] = local.cut([bound.diff() for bound in bounds])
    bases = torch.tensor([0, *[len(value) for value in ids[:-1]]], device=device).cumsum(0)
    begins = local.cut([bound[:-1] for bound in bounds]) + bases[local.sequence_ids]
    whole = torch.cat(ids)
    row_begins = torch.zeros(num_rows, dtype=torch.int64, device=device)
    row_begins[local.rows] = begins
    ends = lengths.cumsum(0)
    take = torch.arange(int(ends[-1]), device=device) + torch.repeat_interleave(row_begins - (ends - lengths), lengths)
    return RolloutSupport(whole[take], torch.cat([ends.new_zeros(1), ends]))
