"""The forward computation: statistics, boundaries and outputs of every row that has a target."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_support.support import boundaries, device, kernels, statistics
from megatron_support.support.candidates import Candidates
from megatron_support.support.replay import ReplayedSets, local_sets, set_log_mass, set_maximum, set_values
from megatron_support.support.rows import Chunk, Rows
from megatron_support.support.selection import Filters
from megatron_support.support.statistics import Statistics
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.types import RolloutSupport

_WORTH_TRIMMING = 0.75
"""Share of kept places above which a copy without the others takes more memory, for a moment, than it saves."""


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
        targets: int64 ``[A]``, global ids; with kernels, the outputs of rows with a target < 0 are NaN.
        filters: None keeps the whole vocabulary.
        entropy: whether to compute the entropy.
        listed: whether to keep the list of kept logits for a sparse backward pass.
    """
    if kernels.usable(rows.logits, rows.dtype):
        with suppress(kernels.KernelFailure):
            return _find(rows, targets, shard, filters, entropy=entropy, listed=listed, fused=True)
    return _find(rows, targets, shard, filters, entropy=entropy, listed=listed, fused=False)


def _find(
    rows: Rows,
    targets: Tensor,
    shard: VocabularyShard,
    filters: Filters | None,
    *,
    entropy: bool,
    listed: bool,
    fused: bool,
) -> Support:
    measure = device.measure if fused else statistics.measure
    found = measure(rows, targets, shard, filters, entropy=entropy, ids=listed and filters is not None)
    if filters is None:
        return _whole(found, found.normalizer.log())
    find = device.find_boundaries if fused else boundaries.find_boundaries
    boundary, last_tie, inside = find(rows, found, shard, filters)
    target_kept = (found.target_logit >= boundary.value) & (found.target_logit > -torch.inf)
    if last_tie is not None:
        target_kept &= (found.target_logit > boundary.value) | (targets <= last_tie)
    candidates = found.local
    # where the host does not wait, it cannot know how many places no row needs
    if candidates is not None and candidates.columns is not None and not fused:
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
    found = _measured(rows, targets, shard, entropy, companion)
    assert found.companion is not None
    log_normalizer = found.normalizer.log()
    log_kept = set_log_mass(values, sets, found.companion, found.maximum, log_normalizer, shard)
    return replace(_whole(found, log_kept), sets=sets)


def _measured(rows: Rows, targets: Tensor, shard: VocabularyShard, entropy: bool, companion: Tensor) -> Statistics:
    """Statistics without candidates."""
    if kernels.usable(rows.logits, rows.dtype):
        with suppress(kernels.KernelFailure):
            return device.measure(rows, targets, shard, None, entropy=entropy, ids=False, companion=companion)
    return statistics.measure(rows, targets, shard, None, entropy=entropy, ids=False, companion=companion)


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


def _trimmed(candidates: Candidates, threshold: Tensor) -> Candidates:
    """The candidates without the places that no row keeps, where those are many."""
    assert candidates.columns is not None
    # descending, so that what any row keeps comes first
    kept = int((candidates.values >= threshold[:, None]).any(0).sum())
    if kept > _WORTH_TRIMMING * candidates.values.shape[1]:
        return candidates
    return Candidates(candidates.values[:, :kept].clone(), candidates.columns[:, :kept].clone())
