"""The forward computation: statistics, boundaries and outputs of every row that has a target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_support.support.candidates import Candidates
from megatron_support.support.refine import Need, count_equal, last_kept_ids, refine
from megatron_support.support.replay import ReplayedSets, local_sets, set_log_mass, set_maximum, set_values
from megatron_support.support.rows import Chunk, Rows
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
from megatron_support.support.statistics import Statistics, measure
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.support.windows import Windows
from megatron_support.types import RolloutSupport

_SELECTED_AT_ONCE = 1 << 20
"""Candidates, of all ranks, handled at a time, which bounds the memory for their float64 masses."""


@dataclass(frozen=True)
class Support:
    """Per-row results ``[A]``; with the logits, all that the backward pass needs."""

    maximum: Tensor
    normalizer: Tensor
    """float64, mass of the vocabulary."""

    log_kept: Tensor
    """float64, log of the support's mass relative to the maximum; of ``normalizer`` where nothing is filtered."""

    threshold: Tensor
    """Smallest kept scaled logit; -inf keeps all."""

    last_tie: Tensor | None
    """int64, largest kept global id among the logits equal to ``threshold``; None where all of them are kept."""

    target_logit: Tensor
    target_kept: Tensor
    """bool"""

    entropy: Tensor | None
    """float64"""

    candidates: Candidates | None
    """This rank's kept logits, of the rows where ``listed``."""

    listed: Tensor | None
    """bool, whether ``candidates`` has all logits of this row's support that this rank holds."""

    sets: ReplayedSets | None = None
    """Replayed supports, in place of a threshold."""

    def keeps(self, values: Tensor, entries: Tensor, ids: Tensor) -> Tensor:
        """bool: whether scaled logits of some rows and global ids, all of one shape, are in their row's support."""
        threshold = self.threshold[entries]
        kept = values >= threshold
        return kept if self.last_tie is None else kept & ((values > threshold) | (ids <= self.last_tie[entries]))

    def kept(self, rows: Rows, chunk: Chunk, x: Tensor, shard: VocabularyShard) -> Tensor:
        """1 where a logit of a chunk ``x [c, W]`` is in the support, else 0, in the compute dtype."""
        threshold = self.threshold[chunk.at, None]
        kept = torch.ge(x, threshold, out=rows.workspace.take("kept", (chunk.size, rows.columns), rows.dtype))
        if self.last_tie is None:
            return kept
        last = self.last_tie[chunk.at] - shard.start
        for i in (last < rows.columns).nonzero().flatten().tolist():
            after = slice(max(int(last[i]) + 1, 0), None)
            kept[i, after] -= (x[i, after] == threshold[i]).to(kept.dtype)
        return kept


def find_support(
    rows: Rows, targets: Tensor, shard: VocabularyShard, filters: Filters | None, *, entropy: bool, listed: bool
) -> Support:
    """Find every row's support; the same on every rank, collective over the shard's group.

    Args:
        targets: int64 ``[A]``, global ids.
        filters: None keeps the whole vocabulary.
        entropy: whether to compute the entropy.
        listed: whether to keep the list of kept logits for a sparse backward pass.
    """
    found = measure(rows, targets, shard, filters, entropy=entropy, ids=listed and filters is not None)
    if filters is None:
        return _whole(found, found.normalizer.log())
    boundary, inside = _boundaries(rows, found, shard, filters)
    last_tie = _last_ties(rows, boundary, shard) if filters.index_ties else None
    target_kept = (found.target_logit >= boundary.value) & (found.target_logit > -torch.inf)
    if last_tie is not None:
        target_kept &= (found.target_logit > boundary.value) | (targets <= last_tie)
    candidates = found.local
    if candidates is not None and candidates.columns is not None:
        candidates = _trimmed(candidates, boundary.value)
    return Support(
        found.maximum,
        found.normalizer,
        boundary.mass(found.maximum).log(),
        boundary.value,
        last_tie,
        found.target_logit,
        target_kept,
        _entropy(found),
        candidates if listed else None,
        inside if listed else None,
    )


def replay_support(
    rows: Rows, targets: Tensor, shard: VocabularyShard, replayed: RolloutSupport, *, entropy: bool
) -> Support:
    """The given supports in place of found ones; the same on every rank, collective over the shard's group.

    Args:
        targets: int64 ``[A]``, global ids.
        replayed: one set per row of the logits, checked.
    """
    sets = local_sets(replayed, rows.index, shard)
    values = set_values(rows, sets)
    companion = set_maximum(values, sets)
    found = measure(rows, targets, shard, None, entropy=entropy, ids=False, companion=companion)
    assert found.companion is not None
    log_normalizer = found.normalizer.log()
    log_kept = set_log_mass(values, sets, found.companion, found.maximum, log_normalizer, shard)
    return replace(_whole(found, log_kept), sets=sets)


def _whole(found: Statistics, log_kept: Tensor) -> Support:
    """The support of rows that no threshold cuts."""
    return Support(
        maximum=found.maximum,
        normalizer=found.normalizer,
        log_kept=log_kept,
        threshold=torch.full_like(found.maximum, -torch.inf),
        last_tie=None,
        target_logit=found.target_logit,
        target_kept=torch.ones_like(found.maximum, dtype=torch.bool),
        entropy=_entropy(found),
        candidates=None,
        listed=None,
    )


def _entropy(found: Statistics) -> Tensor | None:
    """float64 ``[A]``; with e = exp(x - maximum), ``log Z - sum e (x - maximum) / Z``."""
    if found.entropy_sum is None:
        return None
    return found.normalizer.log() - found.entropy_sum / found.normalizer


def _boundaries(rows: Rows, found: Statistics, shard: VocabularyShard, filters: Filters) -> tuple[Boundary, Tensor]:
    """All rows' boundaries, and whether all kept logits of a row are among its candidates."""
    count = found.maximum.numel()
    step = count
    if found.gathered is not None:
        step = max(1, _SELECTED_AT_ONCE // (found.gathered.shape[0] * found.gathered.shape[2]))
    parts = [_boundary(rows, slice(i, min(i + step, count)), found, shard, filters) for i in range(0, count, step)]
    names = ("value", "mass_above", "ties", "kept_ties")
    boundary = Boundary(*(torch.cat([getattr(part, n) for part, _ in parts]) for n in names))
    return boundary, torch.cat([inside for _, inside in parts])


def _listings(found: Statistics, at: slice, shard: VocabularyShard) -> Windows:
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
    listings = _listings(found, at, shard)
    # a row with a NaN or without a finite logit has no support to find, and its outputs are NaN
    sound = torch.isfinite(normalizer)
    top_k, k_unknown = top_k_boundary(listings.k, normalizer, filters)
    k_unknown &= sound
    _count_ties(rows, at, top_k, k_unknown, shard, filters)
    _refine_top_k(rows, at, top_k, k_unknown, maximum, shard, filters)
    if filters.top_p is None:
        final = top_k
    else:
        final, p_unknown = top_p_boundary(listings.p, maximum, top_k, filters)
        _refine_top_p(rows, at, final, p_unknown & sound, top_k, listings.p, found, shard, filters)
    return final, final.value > listings.last


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


def _trimmed(candidates: Candidates, threshold: Tensor) -> Candidates:
    """The candidates without the places that no row keeps."""
    assert candidates.columns is not None
    kept = int((candidates.values >= threshold[:, None]).sum(1).max())
    return Candidates(candidates.values[:, :kept].clone(), candidates.columns[:, :kept].clone())
