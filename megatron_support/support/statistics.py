"""One pass over the logits: maximum, normaliser, entropy sum and the largest logits of every row.

Sums are made in float64: a float32 accumulator over a vocabulary is off by 1e-5, enough to move a nearly flat row's
support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.support import kernels
from megatron_support.support.candidates import CandidatePlan, Candidates, largest
from megatron_support.support.rows import Chunk, Rows, exponential_scale, exponentials, row_sums, shift
from megatron_support.support.vocabulary import VocabularyShard


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
    """``[ranks, A, K]``, every rank's largest scaled logits, descending."""

    local: Candidates | None
    """This rank's own."""

    companion: Tensor | None
    """The further maximum, over all ranks."""


def measure(
    rows: Rows,
    targets: Tensor,
    shard: VocabularyShard,
    wanted: int,
    *,
    entropy: bool,
    ids: bool,
    companion: Tensor | None = None,
) -> Statistics:
    """Measure every row, with two collectives over the shard's group (none for one rank).

    Args:
        targets: int64 ``[A]``, global ids.
        wanted: how many of the largest logits to look for on each rank; 0 for none.
        entropy: whether to sum the entropy.
        ids: whether the columns of the largest logits are wanted.
        companion: ``[A]``, further values to take the maximum of over the ranks, together with the rows' own.
    """
    count = targets.numel()
    device = targets.device
    maximum = torch.empty(count, dtype=rows.dtype, device=device)
    sums = torch.zeros(count, 2 if entropy else 1, dtype=torch.float64, device=device)
    plan = CandidatePlan.of(wanted, shard.width) if wanted else None
    held = min(wanted, shard.columns)
    local = Candidates.empty(count, held, rows.dtype, device, ids=ids) if wanted else None
    if shard.ranks > 1:
        for chunk in rows.chunks:
            maximum[chunk.at] = _row_maximum(rows.scaled(chunk))
        if companion is None:
            maximum = shard.maximum(maximum)
        else:
            maximum, companion = shard.maximum(torch.stack([maximum, companion]))
    fused = kernels.usable(rows.logits, rows.dtype)
    for chunk in rows.chunks if wanted or shard.ranks == 1 or not fused else ():
        x = rows.scaled(chunk)
        groups = plan.group_maxima(x) if plan else x
        if shard.ranks == 1:
            maximum[chunk.at] = _row_maximum(groups)
        if local is not None and plan is not None:
            largest(x, groups, plan, local, chunk.at)
        if not fused:
            _sum(rows, chunk, x, maximum[chunk.at], sums[chunk.at])
    if fused:
        from megatron_support.support.kernels import row_kernels

        sums = row_kernels.row_sums(rows.logits, rows.index, rows.temperatures(), maximum, entropy=entropy).contiguous()
    else:
        sums *= torch.as_tensor(exponential_scale(maximum), device=device)[..., None]
    target_logit = _target_logit(rows, targets, shard)
    words = [sums.view(rows.dtype), target_logit[:, None], *([local.values] if local is not None else [])]
    everyone = shard.gather(torch.cat(words, 1))
    sum_words = sums.view(rows.dtype).shape[1]
    sums = everyone[..., :sum_words].clone(memory_format=torch.contiguous_format).view(torch.float64).sum(0)
    return Statistics(
        maximum,
        sums[:, 0],
        sums[:, 1] if entropy else None,
        everyone[..., sum_words].amax(0),
        everyone[..., sum_words + 1 :] if local is not None else None,
        local,
        companion,
    )


def _row_maximum(x: Tensor) -> Tensor:
    return x.amax(-1) if x.shape[1] else x.new_full((x.shape[0],), -torch.inf)


def _sum(rows: Rows, chunk: Chunk, x: Tensor, maximum: Tensor, sums: Tensor) -> None:
    shape = (chunk.size, rows.columns)
    mass = rows.workspace.take("mass", shape, rows.dtype)
    exponentials(x, maximum, mass)
    sums[:, 0] = row_sums(mass, rows.blocks, rows.workspace)
    if sums.shape[1] == 2:
        shifted = shift(x, maximum, rows.workspace.take("shifted", shape, rows.dtype))
        sums[:, 1] = row_sums(mass.mul_(shifted), rows.blocks, rows.workspace)


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
