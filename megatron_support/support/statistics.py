"""One pass over the logits: maximum, normaliser, entropy sum and the largest logits of every row.

Sums are made in float64: a float32 accumulator over a vocabulary is off by 1e-5, enough to move a nearly flat row's
support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.support.candidates import CandidatePlan, Candidates, largest
from megatron_support.support.rows import Chunk, Rows, exponential_scale, exponentials, row_sums, shift
from megatron_support.support.selection import Filters
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.support.windows import WindowPlan, Windows, describe, limits, listing, window


@dataclass(frozen=True)
class Statistics:
    """Per-row results ``[A]``, the same on every rank but for ``local``."""

    maximum: Tensor
    """Largest scaled logit, in the compute dtype."""

    normalizer: Tensor
    """float64, ``sum exp(x - maximum)``."""

    entropy_sum: Tensor | None
    """float64, ``sum exp(x - maximum) * (x - maximum)``; None unless asked for."""

    target_logit: Tensor
    """Scaled logit of the target, in the compute dtype."""

    gathered: Tensor | None
    """``[ranks, A, K]``, every rank's largest scaled logits, descending; None where ``windows`` has what is needed."""

    windows: Windows | None

    local: Candidates | None
    """This rank's own."""

    companion: Tensor | None
    """The further maximum, over all ranks."""


def measure(
    rows: Rows,
    targets: Tensor,
    shard: VocabularyShard,
    filters: Filters | None,
    *,
    entropy: bool,
    ids: bool,
    companion: Tensor | None = None,
) -> Statistics:
    """Measure every row, with two collectives over the shard's group (none for one rank).

    Args:
        targets: int64 ``[A]``, global ids.
        filters: says how many of the largest logits to look for on each rank; None for none.
        entropy: whether to sum the entropy.
        ids: whether the columns of the largest logits are wanted.
        companion: ``[A]``, further values to take the maximum of over the ranks, together with the rows' own.
    """
    count = targets.numel()
    device = targets.device
    maximum = torch.empty(count, dtype=rows.dtype, device=device)
    sums = torch.zeros(count, 2 if entropy else 1, dtype=torch.float64, device=device)
    search = None
    if filters is not None:
        held = min(filters.candidates, shard.columns)
        plan = CandidatePlan.of(filters.candidates, shard.width)
        search = (plan, Candidates.empty(count, held, rows.dtype, device, ids=ids))
    local = search[1] if search else None
    around = WindowPlan.of(filters, held, shard, rows.dtype) if filters is not None else None
    limit: list[Tensor] = []
    last = maximum
    if shard.ranks > 1:
        for chunk in rows.chunks:
            maximum[chunk.at] = _largest(rows.scaled(chunk), search, chunk.at)
        if around is not None and filters is not None and local is not None:
            lasts, *described = shard.gather_together(_last(local, shard), *describe(local.values, around))
            maximum, last = described[0].amax(0).squeeze(1), lasts.amax(0).squeeze(1)
            limit = limits(described, maximum, around, filters)
        elif companion is None:
            maximum = shard.maximum(maximum)
        else:
            maximum, companion = shard.maximum(torch.stack([maximum, companion]))
    for chunk in rows.chunks:
        x = rows.scaled(chunk)
        if shard.ranks == 1:
            maximum[chunk.at] = _largest(x, search, chunk.at)
        _sum(rows, chunk, x, maximum[chunk.at], sums[chunk.at])
    rows.workspace.clear()
    sums *= torch.as_tensor(exponential_scale(maximum), device=device)[..., None]
    words = [sums, _target_logit(rows, targets, shard)[:, None]]
    if local is not None and around is None:
        words.append(local.values)
    for value in limit:
        assert around is not None and local is not None
        words += window(local.values, value, maximum, around, all_held=held >= shard.width)
    sums, target_logit, *rest = shard.gather_together(*words)
    sums = sums.sum(0)
    windows = None
    if around is not None:
        listings = [listing(rest[i : i + 5], maximum) for i in range(0, len(rest), 5)]
        windows = Windows(last, listings[0], listings[-1])
    return Statistics(
        maximum,
        sums[:, 0],
        sums[:, 1] if entropy else None,
        target_logit.squeeze(-1).amax(0),
        rest[0] if local is not None and around is None else None,
        windows,
        local,
        companion,
    )


def _largest(x: Tensor, search: tuple[CandidatePlan, Candidates] | None, at: slice) -> Tensor:
    """The maxima ``[c]`` of a chunk; its candidates are written where they are searched for."""
    if search is None:
        return _row_maximum(x)
    plan, candidates = search
    groups = plan.group_maxima(x)
    largest(x, groups, plan, candidates, at)
    return _row_maximum(groups)


def _last(local: Candidates, shard: VocabularyShard) -> Tensor:
    """``[A, 1]``: the smallest candidate; -inf where all logits of the rank are candidates."""
    last = local.values[:, -1:]
    return torch.full_like(last, -torch.inf) if local.values.shape[1] >= shard.width else last


def _row_maximum(x: Tensor) -> Tensor:
    return x.amax(-1) if x.shape[1] else x.new_full((x.shape[0],), -torch.inf)


def _sum(rows: Rows, chunk: Chunk, x: Tensor, maximum: Tensor, sums: Tensor) -> None:
    shape = (chunk.size, rows.columns)
    mass = rows.workspace.take("mass", shape, rows.dtype)
    exponentials(x, maximum, mass)
    if sums.shape[1] == 1:
        sums[:, 0] = row_sums(mass, rows.blocks)
        return
    half = -(-rows.columns // 2)
    scratch = rows.workspace.take("half", (chunk.size * half,), rows.dtype)
    sums[:, 0] = row_sums(mass, rows.blocks, scratch)
    for at in (slice(0, half), slice(half, rows.columns)):
        part, logits = mass[:, at], x[:, at]
        part.mul_(shift(logits, maximum, scratch[: part.numel()].view(part.shape)))
    sums[:, 1] = row_sums(mass, rows.blocks)


def _target_logit(rows: Rows, targets: Tensor, shard: VocabularyShard) -> Tensor:
    """Scaled target logit where this rank holds it, else -inf."""
    if rows.columns == 0:
        return torch.full(targets.shape, -torch.inf, dtype=rows.dtype, device=targets.device)
    column = targets - shard.start
    held = (column >= 0) & (column < shard.width)
    entries = torch.arange(targets.numel(), device=targets.device)
    values = rows.scaled_at(entries, column.clamp(0, shard.width - 1))
    # an id beyond the vocabulary, which only the CPU can reject without a synchronisation, becomes a fault
    return values.masked_fill(~held, -torch.inf).masked_fill(targets >= shard.size, torch.nan)
