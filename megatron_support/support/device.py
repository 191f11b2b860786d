"""The forward passes by Triton kernels: statistics, candidates and boundaries, without waiting for the device.

The host never looks at a result, but where it must know whether collectives are due: with more than one rank, once per
search for boundaries that the candidates may not cover. Rows that need nothing cost a launch, not a pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_support.support.boundaries import listings
from megatron_support.support.candidates import Candidates
from megatron_support.support.rows import Rows
from megatron_support.support.selection import (
    ALL_TIES,
    Boundary,
    Filters,
    exp_difference,
    kept_by_mass,
    top_k_boundary,
    top_p_boundary,
    trim,
    where,
)
from megatron_support.support.statistics import Statistics
from megatron_support.support.vocabulary import VocabularyShard


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
    """:func:`statistics.measure` by kernels, with one collective; rows without a target are NaN and not read."""
    from megatron_support.support.kernels.selection import group_size, largest_logits
    from megatron_support.support.kernels.statistics import RowSums, combined, row_statistics

    temperature = rows.temperatures()
    wanted = filters.candidates if filters else 0
    count = min(wanted, shard.width)
    group = group_size(count, shard.width) if count else None
    mine, target_logit, group_maxima = row_statistics(
        rows.logits,
        rows.index,
        temperature,
        targets,
        first_id=shard.start,
        vocabulary=shard.size,
        entropy=entropy,
        group=group,
    )
    local = None
    if wanted:
        local = Candidates.empty(targets.numel(), min(wanted, shard.columns), rows.dtype, targets.device, ids=ids)
        if group is not None and group_maxima is not None:
            values, columns = largest_logits(rows.logits, rows.index, temperature, targets, group_maxima, group, count)
            local.values[:, :count] = values
            if local.columns is not None:
                local.columns[:, :count] = columns
    words = [mine.sums.view(rows.dtype), mine.maximum[:, None], target_logit[:, None]]
    words += [] if companion is None else [companion[:, None]]
    words += [] if local is None else [local.values]
    everyone = shard.gather(torch.cat(words, 1))
    sums, maximum, target_logit, *rest = everyone.split([w.shape[1] for w in words], -1)
    sums = sums.clone(memory_format=torch.contiguous_format).view(torch.float64)
    row = combined(RowSums(maximum.squeeze(-1), sums), 0)
    return Statistics(
        row.maximum,
        row.sums[:, 0].masked_fill(row.maximum == -torch.inf, torch.nan),
        row.sums[:, 1] if entropy else None,
        target_logit.squeeze(-1).amax(0),
        rest[-1] if local is not None else None,
        None,
        local,
        None if companion is None else rest[0].squeeze(-1).amax(0),
    )


def find_boundaries(
    rows: Rows, found: Statistics, shard: VocabularyShard, filters: Filters
) -> tuple[Boundary, Tensor | None, Tensor]:
    """:func:`boundaries.find_boundaries` by kernels."""
    maximum = found.maximum
    known = listings(found, slice(0, maximum.numel()), shard)
    # a row with a NaN, without a finite logit or without a target has no support to find, and its outputs are NaN
    sound = torch.isfinite(found.normalizer)
    top_k, k_unknown = top_k_boundary(known.k, found.normalizer, filters)
    k_unknown &= sound
    if filters.top_k is not None:
        if not filters.index_ties:
            uncounted = (top_k.ties < 0) & ~k_unknown & sound
            ties = torch.where(uncounted, _count_equal(rows, top_k.value, uncounted, shard), top_k.ties)
            top_k = replace(top_k, ties=ties, kept_ties=torch.where(uncounted, ties, top_k.kept_ties))
        if not filters.covers_top_k:
            amount = filters.top_k.double()
            refined = _search(rows, k_unknown, amount, maximum, filters, shard, by_count=True)
            top_k = where(k_unknown, refined, top_k)
    final = top_k
    if filters.top_p is not None:
        final, p_unknown = top_p_boundary(known.p, maximum, top_k, filters)
        p_unknown &= sound
        amount = filters.top_p * top_k.mass(maximum)
        refined = _search(rows, p_unknown, amount, maximum, filters, shard, by_count=False)
        at_k = refined.value <= top_k.value
        refined = where(at_k, trim(top_k, amount, maximum, filters), refined)
        final = where(p_unknown, refined, final)
    last_ties = None
    if filters.index_ties:
        cut = ((final.ties < 0) | (final.kept_ties < final.ties)) & (final.kept_ties > 0) & sound
        last_ties = torch.where(cut, _last_kept_ids(rows, final.value, final.kept_ties, cut, shard), ALL_TIES)
    return final, last_ties, (final.value > known.last) & sound


def _count_equal(rows: Rows, value: Tensor, wanted: Tensor, shard: VocabularyShard) -> Tensor:
    """float64 ``[A]``: how many logits equal ``value [A]`` in the rows where ``wanted [A]``, else 0; collective."""
    from megatron_support.support.kernels.boundary import count_equal

    return shard.total(count_equal(rows.logits, rows.index, rows.temperatures(), value, wanted).double())


def _last_kept_ids(rows: Rows, value: Tensor, kept: Tensor, wanted: Tensor, shard: VocabularyShard) -> Tensor:
    """int64 ``[A]``: global id of each row's ``kept``-th logit that equals its value, lowest id first; collective.

    Only where ``wanted [A]``; undefined elsewhere.
    """
    from megatron_support.support.kernels.boundary import count_equal, locate_equal

    temperature = rows.temperatures()
    missing = torch.where(wanted, kept, 0.0).long()
    if shard.ranks > 1:
        everyone = shard.gather(count_equal(rows.logits, rows.index, temperature, value, wanted))
        missing = (missing - everyone[: shard.rank].sum(0)).clamp(min=0)
    column = locate_equal(rows.logits, rows.index, temperature, value, missing)
    return shard.maximum(torch.where(column >= 0, column + shard.start, -1))


def _search(
    rows: Rows,
    wanted: Tensor,
    amount: Tensor,
    maximum: Tensor,
    filters: Filters,
    shard: VocabularyShard,
    *,
    by_count: bool,
) -> Boundary:
    """The smallest values with less than ``amount [A]`` (mass, or a count) strictly above them; collective.

    Only where ``wanted [A]``; undefined elsewhere.
    """
    from megatron_support.support.kernels.boundary import ROUNDS, Search, histogram, narrow

    room = wanted.numel() if shard.ranks == 1 else int(wanted.sum())
    search = Search.of(wanted, amount, by_count=by_count, room=room)
    if room:
        temperature = rows.temperatures()
        for turn in range(ROUNDS):
            histogram(rows.logits, rows.index, temperature, maximum, search, turn)
            shard.total(search.mass)
            shard.total(search.counts)
            narrow(search, maximum, turn)
    value, above, ties = search.value(), search.mass_above(), search.ties()
    kept = ties
    if filters.index_ties and by_count:
        kept = (amount - search.count_above()).clamp(min=1).minimum(ties)
    elif filters.index_ties:
        kept = kept_by_mass(above, exp_difference(value, maximum), ties, amount)
    return Boundary(value, above, ties, kept)
