"""Every row's boundary in plain torch: from the candidates, or refined where they do not cover it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_support.support.refine import Need, count_equal, last_kept_ids, refine
from megatron_support.support.rows import Rows
from megatron_support.support.selection import (
    ALL_TIES,
    Boundary,
    Filters,
    Listing,
    top_k_boundary,
    top_p_boundary,
    trim,
    where,
)
from megatron_support.support.statistics import Statistics
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.support.windows import Windows

_SELECTED_AT_ONCE = 1 << 20
_SELECTED_AT_ONCE_ALONE = 1 << 15
"""Candidates, of all ranks, handled at a time, which bounds the memory for their float64 masses.

Every turn may make collective calls on several ranks; on one rank, turns cost next to nothing."""


def find_boundaries(
    rows: Rows, found: Statistics, shard: VocabularyShard, filters: Filters
) -> tuple[Boundary, Tensor | None, Tensor]:
    """All rows' boundaries; collective over the shard's group.

    Returns:
        Boundary; int64 ``[A]``, the largest kept id of each row's tie group, or None where all ties are kept; and
        bool ``[A]``, whether all kept logits of a row are among its candidates.
    """
    count = found.maximum.numel()
    step = count
    if found.gathered is not None:
        at_once = _SELECTED_AT_ONCE if shard.ranks > 1 else _SELECTED_AT_ONCE_ALONE
        step = max(1, at_once // (found.gathered.shape[0] * found.gathered.shape[2]))
    parts = [_boundary(rows, slice(i, min(i + step, count)), found, shard, filters) for i in range(0, count, step)]
    names = ("value", "mass_above", "ties", "kept_ties")
    boundary = Boundary(*(torch.cat([getattr(part, n) for part, _ in parts]) for n in names))
    last_ties = _last_ties(rows, boundary, shard) if filters.index_ties else None
    return boundary, last_ties, torch.cat([inside for _, inside in parts])


def listings(found: Statistics, at: slice, shard: VocabularyShard) -> Windows:
    """What is known about the largest logits of some rows."""
    if found.windows is not None:
        return found.windows.at(at)
    assert found.gathered is not None
    gathered, maximum = found.gathered[:, at], found.maximum[at]
    cut_short = [rank for rank in range(shard.ranks) if gathered.shape[2] < shard.width_of(rank)]
    bound = gathered[cut_short, :, -1].amax(0) if cut_short else torch.full_like(maximum, -torch.inf)
    candidates = gathered.transpose(0, 1).flatten(1)
    if shard.ranks > 1:
        candidates = candidates.sort(-1, descending=True).values
    listing = Listing.of(candidates, maximum, bound)
    return Windows(bound, listing, listing)


def _boundary(
    rows: Rows, at: slice, found: Statistics, shard: VocabularyShard, filters: Filters
) -> tuple[Boundary, Tensor]:
    maximum, normalizer = found.maximum[at], found.normalizer[at]
    filters = filters.at(at)
    known = listings(found, at, shard)
    # a row with a NaN or without a finite logit has no support to find, and its outputs are NaN
    sound = torch.isfinite(normalizer)
    top_k, k_unknown = top_k_boundary(known.k, normalizer, filters)
    k_unknown &= sound
    _count_ties(rows, at, top_k, k_unknown, shard, filters)
    _refine_top_k(rows, at, top_k, k_unknown, maximum, shard, filters)
    if filters.top_p is None:
        final = top_k
    else:
        final, p_unknown = top_p_boundary(known.p, maximum, top_k, filters)
        _refine_top_p(rows, at, final, p_unknown & sound, top_k, known.p, found, shard, filters)
    return final, final.value > known.last


def _entries(at: slice, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the true entries, inside the slice and in all rows."""
    local = chosen.nonzero().flatten()
    return local, local + at.start


def _count_ties(
    rows: Rows, at: slice, top_k: Boundary, k_unknown: Tensor, shard: VocabularyShard, filters: Filters
) -> None:
    """Count, in place, the ties of k-th largest logits that may go beyond the candidates."""
    if filters.top_k is None or filters.index_ties:
        return
    local, entries = _entries(at, (top_k.ties < 0) & ~k_unknown)
    if local.numel():
        ties = count_equal(rows, entries, top_k.value[local], shard)
        top_k.ties[local] = ties
        top_k.kept_ties[local] = ties


def _refine_top_k(
    rows: Rows,
    at: slice,
    top_k: Boundary,
    k_unknown: Tensor,
    maximum: Tensor,
    shard: VocabularyShard,
    filters: Filters,
) -> None:
    """Find, in place, the k-th largest logits that are not among the candidates."""
    local, entries = _entries(at, k_unknown)
    if not local.numel():
        return
    assert filters.top_k is not None
    amount = filters.top_k[local].double()
    need = Need(
        amount=amount,
        by_count=True,
        total=torch.full_like(amount, shard.size),
        known=torch.zeros_like(amount),
        ceiling=maximum[local],
        maximum=maximum[local],
    )
    top_k.write(local, refine(rows, entries, need, filters, shard))


def _refine_top_p(
    rows: Rows,
    at: slice,
    final: Boundary,
    unknown: Tensor,
    top_k: Boundary,
    listing: Listing,
    found: Statistics,
    shard: VocabularyShard,
    filters: Filters,
) -> None:
    """Find, in place, the top-p boundaries that are not listed."""
    local, entries = _entries(at, unknown)
    if not local.numel():
        return
    assert filters.top_p is not None
    maximum, normalizer = found.maximum[entries], found.normalizer[entries]
    stage = Boundary(*(t[local] for t in (top_k.value, top_k.mass_above, top_k.ties, top_k.kept_ties)))
    amount = filters.top_p[local] * stage.mass(maximum)
    bound, mass = listing.bound[local], listing.held()[local]
    # the whole row is listed and rounding left the need unreached, or the boundary is above the list: from the top
    whole = (bound == -torch.inf) | (mass >= amount)
    need = Need(
        amount=amount,
        by_count=False,
        total=normalizer,
        known=torch.where(whole, 0.0, mass),
        ceiling=torch.where(whole, maximum, bound),
        maximum=maximum,
    )
    boundary = refine(rows, entries, need, filters, shard)
    at_k = boundary.value <= stage.value
    final.write(local, where(at_k, trim(stage, amount, maximum, filters), boundary))


def _last_ties(rows: Rows, boundary: Boundary, shard: VocabularyShard) -> Tensor:
    """Largest kept id of each row's tie group; a constant where the whole group is kept."""
    last = torch.full(boundary.value.shape, ALL_TIES, dtype=torch.int64, device=boundary.value.device)
    cut = ((boundary.ties < 0) | (boundary.kept_ties < boundary.ties)) & (boundary.kept_ties > 0)
    entries = cut.nonzero().flatten()
    if entries.numel():
        last[entries] = last_kept_ids(rows, entries, boundary.value[entries], boundary.kept_ties[entries], shard)
    return last
