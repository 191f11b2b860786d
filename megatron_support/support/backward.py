"""The gradient with respect to the logits, recomputed from the saved per-row scalars.

With p the distribution over the vocabulary, H its entropy and q the filtered distribution, per row and column j::

    grad_j = (g_f (1[j = target] - q_j 1[j kept]) + g_u (1[j = target] - p_j) - g_e p_j (log p_j + H)) / temperature

Rows without an upstream gradient get zeros whatever their logits hold. Rows with g_f alone need no pass over the
logits where their kept logits are listed: the gradient is zero outside the support.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_support.support import kernels
from megatron_support.support.engine import Support
from megatron_support.support.replay import ReplayedSets
from megatron_support.support.rows import Chunk, Rows, exponential_scale, exponentials, shift, split_rows
from megatron_support.support.vocabulary import VocabularyShard

_WRITTEN_AT_ONCE = 1 << 14
"""Candidates whose gradients are worked out at a time, which bounds the memory for them."""


@dataclass(frozen=True)
class Upstream:
    """Gradients of the outputs, ``[A]`` in the compute dtype, already divided by the temperature; None for none."""

    filtered: Tensor | None
    unfiltered: Tensor | None
    entropy: Tensor | None

    def nonzero(self) -> Tensor:
        """bool ``[A]``: rows that get a gradient."""
        parts = [g != 0 for g in (self.filtered, self.unfiltered, self.entropy) if g is not None]
        wanted = parts[0]
        for part in parts[1:]:
            wanted = wanted | part
        return wanted


def write_gradient(
    rows: Rows, support: Support, targets: Tensor, upstream: Upstream, shard: VocabularyShard, out: Tensor
) -> None:
    """Write the gradient of every row to ``out [T, W]``, which may be the storage of the logits.

    Args:
        rows: as in the forward pass.
        targets: int64 ``[A]``, global ids.
    """
    if rows.columns == 0:
        return
    if support.sets is not None:
        _write_replayed(rows, support, support.sets, targets, upstream, shard, out)
        return
    if kernels.usable(rows.logits, rows.dtype):
        with suppress(kernels.KernelFailure):
            _write_fused(rows, support, targets, upstream, shard, out)
            return
    wanted = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
    wanted[rows.index] = upstream.nonzero() & (targets >= 0)
    dense = wanted
    listed = is_sparse(support, upstream)
    if listed is not None:
        sparse = torch.zeros_like(wanted)
        sparse[rows.index] = listed
        dense = wanted & ~sparse
    entry = torch.zeros(out.shape[0], dtype=torch.int64, device=out.device)
    entry[rows.index] = torch.arange(rows.index.numel(), device=out.device)
    for chunk in split_rows(~dense, rows.columns):
        out[chunk.rows].zero_()
    weights = _Weights.of(support, upstream, exponential_scale(support.maximum))
    column = targets - shard.start
    held = (column >= 0) & (column < shard.width)
    at_target = torch.where(held, weights.target, 0.0)
    column = column.clamp(0, max(shard.width - 1, 0))
    for chunk in split_rows(dense, rows.columns):
        first = int(entry[chunk.rows.start])
        placed = Chunk(chunk.rows, slice(first, first + chunk.size))
        _dense(rows, placed, support, weights, column, at_target, shard, out)
    if dense is not wanted:
        entries = (wanted & ~dense)[rows.index].nonzero().flatten()
        _write_sparse(rows, support, entries, targets, upstream, shard, out)


def _write_fused(
    rows: Rows, support: Support, targets: Tensor, upstream: Upstream, shard: VocabularyShard, out: Tensor
) -> None:
    """:func:`write_gradient` by a kernel over all rows, and one that adds the listed ones' kept logits.

    Raises:
        KernelFailure: nothing was written.
    """
    from megatron_support.support.kernels.gradient import listed_gradient, row_gradient

    if rows.index.numel() < out.shape[0]:
        untouched = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
        untouched[rows.index] = False
        for chunk in split_rows(untouched, rows.columns):
            out[chunk.rows].zero_()
    weights = _Weights.of(support, upstream)
    wanted = upstream.nonzero() & (targets >= 0)
    listed = is_sparse(support, upstream)
    last_tie = None if support.last_tie is None else support.last_tie - shard.start
    row_gradient(
        rows.logits,
        out,
        rows.index,
        rows.temperatures(),
        support.maximum,
        support.threshold,
        last_tie,
        kept=weights.kept,
        everywhere=weights.all,
        entropy=weights.entropy,
        offset=weights.offset,
        target_column=targets - shard.start,
        target_weight=weights.target,
        wanted=wanted if listed is None else wanted & ~listed,
    )
    if listed is None:
        return
    assert support.candidates is not None and support.candidates.columns is not None and weights.kept is not None
    try:
        listed_gradient(
            out,
            rows.index,
            support.maximum,
            support.threshold,
            last_tie,
            kept=weights.kept,
            target_column=targets - shard.start,
            target_weight=weights.target,
            wanted=wanted & listed,
            values=support.candidates.values,
            places=support.candidates.columns,
        )
    except kernels.KernelFailure:
        # the logits may be overwritten by now, and are not needed
        _write_sparse(rows, support, (wanted & listed).nonzero().flatten(), targets, upstream, shard, out)


def _write_sparse(
    rows: Rows,
    support: Support,
    entries: Tensor,
    targets: Tensor,
    upstream: Upstream,
    shard: VocabularyShard,
    out: Tensor,
) -> None:
    """Write the kept logits' gradients of rows ``entries``, all of them listed."""
    assert support.candidates is not None
    step = max(1, _WRITTEN_AT_ONCE // max(1, support.candidates.values.shape[1]))
    weights = _Weights.of(support, upstream)
    for some in entries.split(step):
        found = _sparse_gradient(support, some, targets, weights, shard)
        out.index_put_((rows.index[found.entry], found.column), found.value.to(out.dtype))


@dataclass(frozen=True)
class _Weights:
    """Per-row factors ``[A]`` of ``e = exp(x - maximum)``, in the compute dtype."""

    kept: Tensor | None
    """Of e where it is in the support."""

    all: Tensor | None
    """Of e everywhere."""

    entropy: Tensor | None
    """Of ``e * (x - maximum + offset)``."""

    offset: Tensor | None
    target: Tensor
    """Added at the target."""

    @classmethod
    def of(cls, support: Support, upstream: Upstream, scale: Tensor | float = 1.0) -> _Weights:
        """The factors of exponentials that have to be multiplied by ``scale [A]`` first."""
        dtype = support.maximum.dtype
        kept = everywhere = entropy = offset = None
        target = torch.zeros_like(support.maximum)
        if upstream.filtered is not None:
            kept = (-upstream.filtered.double() * (-support.log_kept).exp() * scale).to(dtype)
            target = target + upstream.filtered
        if upstream.unfiltered is not None:
            everywhere = (-upstream.unfiltered.double() / support.normalizer * scale).to(dtype)
            target = target + upstream.unfiltered
        if upstream.entropy is not None:
            assert support.entropy is not None
            entropy = (-upstream.entropy.double() / support.normalizer * scale).to(dtype)
            offset = (support.entropy - support.normalizer.log()).to(dtype)
        return cls(kept, everywhere, entropy, offset, target)


def _dense(
    rows: Rows,
    chunk: Chunk,
    support: Support,
    weights: _Weights,
    column: Tensor,
    at_target: Tensor,
    shard: VocabularyShard,
    out: Tensor,
) -> None:
    at, shape = chunk.at, (chunk.size, rows.columns)
    x = rows.scaled(chunk)
    maximum, target = support.maximum[at], out[chunk.rows]
    direct = target.dtype == rows.dtype
    # the logits, if they are the output, are read for the last time in the product's operands
    inplace = out.untyped_storage().data_ptr() == rows.logits.untyped_storage().data_ptr()
    # vector instructions end elsewhere in rows with a gap between them, and differ there in the last bit
    fits = direct and not inplace and target.is_contiguous()
    mass = exponentials(x, maximum, target if fits else rows.workspace.take("mass", shape, rows.dtype))
    factor = None
    if weights.entropy is not None and weights.offset is not None:
        factor = shift(x, maximum, rows.workspace.take("factor", shape, rows.dtype))
        factor.add_(weights.offset[at, None]).mul_(weights.entropy[at, None])
        if weights.all is not None:
            factor.add_(weights.all[at, None])
    if weights.kept is not None:
        kept = support.kept(rows, chunk, x, shard).mul_(weights.kept[at, None])
        if factor is not None:
            factor.add_(kept)
        else:
            factor = kept if weights.all is None else kept.add_(weights.all[at, None])
    if factor is None:
        assert weights.all is not None
        factor = weights.all[at, None]
    gradient = torch.mul(mass, factor, out=target if direct else mass)
    gradient.scatter_add_(1, column[at, None], at_target[at, None])
    if not direct:
        target.copy_(gradient)


@dataclass(frozen=True)
class SparseGradient:
    """The nonzero gradients of some rows; a place occurs once."""

    entry: Tensor
    """int64 ``[N]``, which of the rows worked on."""

    column: Tensor
    """int64 ``[N]``, column of this rank's logits."""

    value: Tensor
    """``[N]``, in the compute dtype."""


def is_sparse(support: Support, upstream: Upstream) -> Tensor | None:
    """bool ``[A]``, rows whose gradient is zero but for their listed kept logits; None where none is."""
    if support.listed is None or upstream.unfiltered is not None or upstream.entropy is not None:
        return None
    return support.listed


def sparse_gradient(
    support: Support, entries: Tensor, targets: Tensor, upstream: Upstream, shard: VocabularyShard
) -> SparseGradient:
    """The gradient of rows ``entries [R]``, all of them sparse, without reading their logits.

    Args:
        targets: int64 ``[A]``, global ids.
    """
    return _sparse_gradient(support, entries, targets, _Weights.of(support, upstream), shard)


def _sparse_gradient(
    support: Support, entries: Tensor, targets: Tensor, weights: _Weights, shard: VocabularyShard
) -> SparseGradient:
    assert weights.kept is not None
    assert support.candidates is not None and support.candidates.columns is not None
    values, columns = support.candidates.values[entries], support.candidates.columns[entries]
    # -inf stands for a place without a logit, and is in no support
    kept = support.keeps(values, entries[:, None], columns + shard.start) & (values > -torch.inf)
    mass = (values - support.maximum[entries, None]).exp() * weights.kept[entries, None]
    hit = columns + shard.start == targets[entries, None]
    gradient = mass + torch.where(hit, weights.target[entries, None], 0.0)
    return SparseGradient(entries[:, None].expand_as(columns)[kept], columns[kept], gradient[kept])


def _write_replayed(
    rows: Rows,
    support: Support,
    sets: ReplayedSets,
    targets: Tensor,
    upstream: Upstream,
    shard: VocabularyShard,
    out: Tensor,
) -> None:
    """The gradient under replayed supports: dense for the unfiltered outputs, then the sets' own logits added."""
    filtered, unfiltered = upstream.filtered, upstream.unfiltered
    if filtered is not None and bool(sets.empty.any()):
        # without a set, the filtered log-probability is the unfiltered one
        same = torch.where(sets.empty, filtered, 0.0)
        unfiltered = same if unfiltered is None else unfiltered + same
        filtered = torch.where(sets.empty, 0.0, filtered)
    added = None
    if filtered is not None:
        distance = rows.scaled_at(sets.entry, sets.column).double() - support.maximum[sets.entry].double()
        share = (distance - support.log_kept[sets.entry]).exp()
        hit = sets.column + shard.start == targets[sets.entry]
        added = filtered[sets.entry] * (hit.double() - share).to(rows.dtype)
    if unfiltered is None and upstream.entropy is None:
        out.zero_()
    else:
        write_gradient(
            rows, replace(support, sets=None), targets, Upstream(None, unfiltered, upstream.entropy), shard, out
        )
    if added is None or filtered is None:
        return
    taken = filtered[sets.entry] != 0
    place = (rows.index[sets.entry[taken]], sets.column[taken])
    out[place] = (out[place].to(rows.dtype) + added[taken]).to(out.dtype)
