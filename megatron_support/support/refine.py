"""Exact boundary of the rows that the candidates do not cover: sample, one pass, then histograms of what is left.

A histogram of a strided sample of the row brackets the boundary. One pass over the row sums what lies above the bracket
and copies what lies inside, a few percent of the row; whether the bracket holds the boundary is checked on exact sums,
never assumed. Histograms of the copied logits narrow it down to one value, 256 times per round. Everything a decision
rests on is the same for every split of the vocabulary: sampled ids are global, and only counts, sums and extrema are
exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.support.rows import Rows, exponential_scale, exponentials, row_sums
from megatron_support.support.selection import Boundary, Filters, exp_difference, kept_by_mass
from megatron_support.support.vocabulary import VocabularyShard

_SAMPLE_STRIDE = 16
_SAMPLE_BINS = 512
_SAMPLE_SPREAD = 3.0
"""Half width of the bracket in standard errors of the mass estimated from the sample."""

_SAMPLE_DEPTH = 40.0
"""Sampled logits further below the maximum than this share a bin: their masses are nothing."""

_BINS = 256
_BATCH_ELEMENTS = 1 << 21
_BATCH_ELEMENTS_ALONE = 1 << 20
"""Logits of the rows worked on at a time, which bounds the memory for copied ones: some 8 MiB where 5% are of 2^21.

On one rank no collective calls are shared between the rows of a batch, and fewer of them take less memory."""


@dataclass(frozen=True)
class Need:
    """Find the smallest value with less than ``amount`` (mass, or a count) strictly above it. ``[R]`` each, float64."""

    amount: Tensor
    by_count: bool
    total: Tensor
    """Mass or count of the whole row."""

    known: Tensor
    """Mass or count strictly above ``ceiling``; less than ``amount``."""

    ceiling: Tensor
    """An upper limit of the boundary, in the compute dtype."""

    maximum: Tensor
    """Of the row, in the compute dtype."""

    def at(self, entries: slice | Tensor) -> Need:
        return Need(
            self.amount[entries],
            self.by_count,
            self.total[entries],
            self.known[entries],
            self.ceiling[entries],
            self.maximum[entries],
        )


def refine(rows: Rows, entries: Tensor, need: Need, filters: Filters, shard: VocabularyShard) -> Boundary:
    """The exact boundary of rows ``entries [R]``; collective over the shard's group.

    Args:
        need: what has to lie above, per row of ``entries``.
        filters: says how ties are cut.
    """
    # padded columns are counted, so that all ranks make the same collective calls
    batch = max(1, (_BATCH_ELEMENTS if shard.ranks > 1 else _BATCH_ELEMENTS_ALONE) // shard.columns)
    found = [
        _refine(rows, entries[i : i + batch], need.at(slice(i, i + batch)), filters, shard)
        for i in range(0, entries.numel(), batch)
    ]
    return Boundary(*(torch.cat([getattr(f, n) for f in found]) for n in ("value", "mass_above", "ties", "kept_ties")))


def _refine(rows: Rows, entries: Tensor, need: Need, filters: Filters, shard: VocabularyShard) -> Boundary:
    low, high = _bracket(rows, entries, need, shard)
    inside = _split(rows, entries, low, high, need, shard)
    above = inside.sums[:, int(need.by_count)]
    reached = above + inside.sums[:, 2 + int(need.by_count)]
    lowest = torch.finfo(rows.dtype).min
    too_low, too_high = above >= need.amount, (reached < need.amount) & (low > lowest)
    missed = (too_low | too_high).nonzero().flatten()
    if missed.numel():
        wrong = too_low | too_high
        again_high = torch.where(too_low, need.ceiling, low)
        low = torch.where(wrong, torch.where(too_low, high, lowest), low)
        high = torch.where(wrong, again_high, high)
        part = need.at(missed)
        inside = inside.replaced(missed, _split(rows, entries[missed], low[missed], high[missed], part, shard))
    return _narrow(inside, low, high, need, filters, shard)


def _bracket(rows: Rows, entries: Tensor, need: Need, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """``[R]`` values between which the boundary probably lies.

    The mass above a value is estimated from the sample above it and, the total being known, from the sample below it;
    the estimate with the smaller standard error counts.
    """
    lowest = torch.finfo(rows.dtype).min
    top, floor, sums = _sampled_masses(rows, entries, need, shard)
    width = (top - floor).clamp(min=torch.finfo(torch.float64).tiny) / (_SAMPLE_BINS - 1)
    cumulative = sums.cumsum(-1)
    edges = top[:, None] - width[:, None] * torch.arange(1, _SAMPLE_BINS + 1, device=top.device)
    # one more sample at the edge: a bin that caught none is not certain to be empty
    unseen = 1.0 if need.by_count else exp_difference(edges, need.maximum[:, None]).square()
    above = need.known[:, None] + _SAMPLE_STRIDE * cumulative[0]
    below = need.total[:, None] - _SAMPLE_STRIDE * (cumulative[0, :, -1:] - cumulative[0])
    error_above, error_below = cumulative[1] + unseen, cumulative[1, :, -1:] - cumulative[1] + unseen
    mass = torch.where(error_above < error_below, above, below)
    error = _SAMPLE_SPREAD * _SAMPLE_STRIDE * torch.minimum(error_above, error_below).sqrt()
    places = torch.arange(1, _SAMPLE_BINS + 1, device=top.device)
    last_under = ((mass + error < need.amount[:, None]) * places).amax(1)
    first_over = ((mass - error >= need.amount[:, None]) * (_SAMPLE_BINS + 1 - places)).amax(1)
    high = torch.where(last_under > 0, (top - width * last_under).to(rows.dtype), need.ceiling)
    low = (top - width * (_SAMPLE_BINS + 1 - first_over)).to(rows.dtype)
    low = torch.where((first_over > 0) & (low > floor), low, lowest)
    return torch.minimum(low, high), high


def _sampled_masses(rows: Rows, entries: Tensor, need: Need, shard: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """Histograms of the sampled logits not above the ceiling, in bins from the ceiling down to a floor.

    Returns:
        float64: ceiling ``[R]``, floor ``[R]``, and sums of masses and of their squares ``[2, R, bins]``.
    """
    first = -shard.start % _SAMPLE_STRIDE
    samples = [rows.scaled_sample(chunk, first, _SAMPLE_STRIDE) for chunk in rows.singly(entries)]
    floor = torch.full_like(need.ceiling, torch.inf)
    for i, sample in enumerate(samples):
        if sample.numel():
            floor[i] = sample.masked_fill(sample == -torch.inf, torch.inf).amin()
    floor = -shard.maximum(-floor)
    if not need.by_count:
        floor = torch.maximum(floor, need.maximum - _SAMPLE_DEPTH)
    top, floor = need.ceiling.double(), torch.minimum(floor, need.ceiling).double()
    # finite where all sampled logits are equal, so that their distance of 0 stays 0
    span = (top - floor).clamp(min=torch.finfo(torch.float64).tiny)
    scale = ((_SAMPLE_BINS - 1) / span).clamp(max=-torch.finfo(rows.dtype).min).to(rows.dtype)
    # the first bin takes what is above the ceiling, and is dropped
    sums = torch.zeros(2, entries.numel(), _SAMPLE_BINS + 1, dtype=torch.float64, device=entries.device)
    for i, sample in enumerate(samples):
        slot = ((need.ceiling[i] - sample[0]) * scale[i]).floor_().clamp_(-1, _SAMPLE_BINS - 1).long() + 1
        weight = exponentials(sample, need.maximum[i : i + 1], torch.empty_like(sample))[0].double()
        if need.by_count:
            weight = torch.ones_like(weight)
        sums[0, i].index_add_(0, slot, weight)
        sums[1, i].index_add_(0, slot, weight.square())
    return top, floor, shard.total(sums)[..., 1:]


@dataclass(frozen=True)
class _Inside:
    """What brackets split rows into; the sums ``[R]`` are over all ranks."""

    sums: Tensor
    """float64 ``[R, 4]``: mass and count above the bracket, mass and count inside."""

    values: Tensor
    """``[N]``, this rank's scaled logits inside the brackets."""

    times: Tensor
    """float64 ``[N]``, how often each occurs."""

    mass: Tensor
    """float64 ``[N]``, of all those."""

    row: Tensor
    """int64 ``[N]``, the row of each."""

    def replaced(self, entries: Tensor, other: _Inside) -> _Inside:
        """With the rows ``entries`` taken from ``other``."""
        kept = torch.ones(self.sums.shape[0], dtype=torch.bool, device=entries.device)
        kept[entries] = False
        keep = kept[self.row]
        return _Inside(
            self.sums.index_copy(0, entries, other.sums),
            torch.cat([self.values[keep], other.values]),
            torch.cat([self.times[keep], other.times]),
            torch.cat([self.mass[keep], other.mass]),
            torch.cat([self.row[keep], entries[other.row]]),
        )


def _split(rows: Rows, entries: Tensor, low: Tensor, high: Tensor, need: Need, shard: VocabularyShard) -> _Inside:
    """What the brackets ``[low, high]`` split the rows into, by one pass."""
    above, values, times = _read(rows, entries, low, high, need.maximum)
    rows.workspace.clear()
    row = torch.repeat_interleave(torch.tensor([v.numel() for v in values], device=entries.device))
    inside, often = torch.cat(values), torch.cat(times)
    mass = exp_difference(inside, need.maximum[row]).mul_(often)
    sums = torch.zeros(entries.numel(), 4, dtype=torch.float64, device=entries.device)
    sums[:, :2] = above
    sums[:, 2].index_add_(0, row, mass)
    sums[:, 3].index_add_(0, row, often)
    return _Inside(shard.total(sums), inside, often, mass, row)


def _read(
    rows: Rows, entries: Tensor, low: Tensor, high: Tensor, maximum: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Of this rank, float64 ``[R, 2]`` mass and count above ``high``; per row the logits inside, and how often each."""
    sums = torch.zeros(entries.numel(), 2, dtype=torch.float64, device=entries.device)
    values, times = [], []
    shape = (1, rows.columns)
    mass, over, under = (rows.workspace.take(name, shape, rows.dtype) for name in ("mass", "over", "under"))
    between = rows.workspace.take("between", shape, torch.bool)
    single = (low == high).tolist()
    for i, chunk in enumerate(rows.singly(entries)):
        x, at = rows.scaled(chunk), slice(i, i + 1)
        torch.gt(x, high[at, None], out=over)
        torch.ge(x, low[at, None], out=under)
        sums[i, 1] = over.sum()  # exact: a count below 2^24
        if single[i]:
            values.append(high[at])
            times.append(under.sub_(over).sum(dtype=torch.float64, dim=-1))
        else:
            places = torch.gt(under, over, out=between).view(-1).nonzero().flatten()
            values.append(x.view(-1).index_select(0, places))
            times.append(torch.ones((), dtype=torch.float64, device=entries.device).expand(places.numel()))
        exponentials(x, maximum[at], mass)
        sums[i, 0] = row_sums(over.mul_(mass), rows.blocks)[0]
    sums[:, 0] *= exponential_scale(maximum)
    return sums, values, times


def _narrow(
    inside: _Inside, low: Tensor, high: Tensor, need: Need, filters: Filters, shard: VocabularyShard
) -> Boundary:
    """Histogram the logits inside ``[low, high]`` until one value is left per row; one collective a round.

    Values are told apart by integers of the same order, so that the number of rounds depends on the bracket alone.
    """
    # a sum with 0 makes the two zeros one
    key, row, times, mass = _order_key(inside.values + 0.0), inside.row, inside.times, inside.mass
    dropped = _DROPPED[inside.values.dtype]
    first, last = _order_key(low + 0.0) >> dropped, _order_key(high + 0.0) >> dropped
    base = inside.sums[:, :2].t().contiguous()
    count = need.amount.numel()
    while True:
        width = (last - first) // _BINS + 1
        slot = last[row].sub_(key >> dropped if dropped else key).floor_divide_(width[row]).add_(row, alpha=_BINS)
        histogram = torch.zeros(2, count * _BINS, dtype=torch.float64, device=key.device)
        histogram[0].index_add_(0, slot, mass)
        histogram[1].index_add_(0, slot, times)
        histogram = shard.total(histogram).view(2, count, _BINS)
        before = histogram.cumsum(-1) - histogram + base[..., None]
        possible = (before[int(need.by_count)] < need.amount[:, None]) & (histogram[1] > 0)
        chosen = (possible * torch.arange(1, _BINS + 1, device=key.device)).argmax(-1)
        base = before.gather(2, chosen.expand(2, -1)[..., None]).squeeze(2)
        last = last - chosen * width
        first = torch.maximum(first, last - width + 1)
        found = bool((width == 1).all())
        if found and not dropped:
            break
        keep = slot == chosen[row] + row * _BINS
        key, times, row, mass = key[keep], times[keep], row[keep], mass[keep]
        if found:
            first = last << dropped
            last, dropped = first + (1 << dropped) - 1, 0
    value = _from_order_key(last, need.maximum.dtype)
    ties = histogram[1].gather(1, chosen[:, None]).squeeze(1)
    if not filters.index_ties:
        kept = ties
    elif need.by_count:
        kept = (need.amount - base[1]).clamp(min=1).minimum(ties)
    else:
        kept = kept_by_mass(base[0], exp_difference(value, need.maximum), ties, need.amount)
    return Boundary(value, base[0], ties, kept)


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_DROPPED = {torch.float32: 0, torch.float64: 2}
"""Low bits that are told apart in a round of their own, so that differences of two keys stay in int64."""


def _order_key(values: Tensor) -> Tensor:
    """int64 that order as the values do."""
    integer = _INTEGERS[values.dtype]
    bits = values.view(integer)
    return torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits).long()


def _from_order_key(key: Tensor, dtype: torch.dtype) -> Tensor:
    integer = _INTEGERS[dtype]
    bits = key.to(integer)
    return torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits).view(dtype)


def count_equal(rows: Rows, entries: Tensor, values: Tensor, shard: VocabularyShard) -> Tensor:
    """float64 ``[R]``: how many logits of each row equal ``values [R]``; collective over the shard's group."""
    counts = torch.zeros(entries.numel(), dtype=torch.float64, device=entries.device)
    for i, chunk in enumerate(rows.singly(entries)):
        counts[i] = (rows.scaled(chunk) == values[i]).sum()
    return shard.total(counts)


def last_kept_ids(rows: Rows, entries: Tensor, values: Tensor, kept: Tensor, shard: VocabularyShard) -> Tensor:
    """int64 ``[R]``: global id of each row's ``kept``-th logit that equals its value, lowest id first; collective."""
    places = [(rows.scaled(chunk)[0] == values[i]).nonzero().flatten() for i, chunk in enumerate(rows.singly(entries))]
    counts = torch.tensor([p.numel() for p in places], device=entries.device)
    everyone = shard.gather(counts)
    rank = shard.rank
    before = everyone[:rank].sum(0)
    found = torch.full((entries.numel(),), -1, dtype=torch.int64, device=entries.device)
    wanted = kept.long() - 1 - before
    for i, place in enumerate(places):
        mine = (wanted[i] >= 0) & (wanted[i] < place.numel())
        if bool(mine):
            found[i] = place[wanted[i]] + shard.start
    return shard.maximum(found)
