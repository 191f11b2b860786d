"""Per-token values of microbatches, back in the batch's order on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.distributed.groups import ParallelGroups
from megatron_support.types import TokenBatch, TokenLogprobs


def gather_columns(
    pieces: Sequence[tuple[TokenBatch, Tensor]], rows: int, total: int, *, groups: ParallelGroups, device: torch.device
) -> Tensor:
    """Collective over all ranks.

    Args:
        pieces: this rank's microbatches of T tokens in any order, each with fp32 ``[rows, T]``; none elsewhere than on
            the last pipeline stage.
        rows: values per token, the same on every rank.
        total: N, tokens of the batch.
        groups: the ranks' layout.
        device: of the microbatches.

    Returns:
        fp32 ``[rows, N]`` on the host; 0 outside responses.
    """
    columns = torch.zeros(rows, total + 1, dtype=torch.float32, device=device)  # the last entry takes padding
    for batch, values in pieces:
        index = torch.where(batch.targets >= 0, batch.token_index, total)
        columns.index_copy_(1, index, torch.where(batch.response_mask, values.float(), 0.0))
    return _everywhere(columns[:, :total].contiguous(), groups).cpu()


def gather_logprobs(
    pieces: Sequence[tuple[TokenBatch, TokenLogprobs]],
    total: int,
    groups: ParallelGroups,
    device: torch.device,
    *,
    entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities of microbatches as :func:`gather_columns` returns them.

    Args:
        pieces: this rank's microbatches.
        total, groups, device: as there.
        entropy: whether the pieces have one; the same on every rank.

    Returns:
        fp32 ``[N]`` each on the host: filtered, unfiltered, and the entropy or None; 0 outside responses.
    """
    stacked = [(batch, torch.stack(logprob_rows(values, entropy))) for batch, values in pieces]
    filtered, unfiltered, *rest = gather_columns(stacked, 2 + entropy, total, groups=groups, device=device)
    return filtered, unfiltered, rest[0] if rest else None


def logprob_rows(values: TokenLogprobs, entropy: bool) -> list[Tensor]:
    """Filtered, unfiltered, and the entropy where it is wanted."""
    rows = [values.filtered, values.unfiltered]
    if entropy:
        assert values.entropy is not None
        rows.append(values.entropy)
    return rows


def _everywhere(columns: Tensor, groups: ParallelGroups) -> Tensor:
    """Each token was computed on one data- and context-parallel rank of the last stage: sum there, then hand it down.

    0 + -inf is -inf, so a token outside the support stays so.
    """
    if groups.data_context is not None and groups.is_last_stage:
        dist.all_reduce(columns, group=groups.data_context)
    if groups.pipeline is not None:
        dist.broadcast(columns, src=groups.last_stage_rank, group=groups.pipeline)
    return columns
