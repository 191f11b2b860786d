"""Boundaries that the candidates do not cover, found without the host: histograms, narrowed down to one value.

The rows are listed on the device, and a fixed number of programs takes them one after the other: where there is none,
they end at once. Masses are summed as 64-bit integers, so that atomic additions give the same sums in any order, on one
rank or many. The first round bins by distance from the maximum, which spreads the logits; the others bin integers that
order as floats do, and cut 2^32 of them down to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_support.support.kernels import launch
from megatron_support.support.kernels.common import LOG2_E, load_scaled, order_key
from megatron_support.support.kernels.statistics import BLOCK

ROUNDS = 5
"""One by distance, four by order: 256^4 = 2^32."""

_BINS = 256
_PROGRAMS = 1024
_SPLITS = 8
_UNIT = tl.constexpr(float(1 << 42))
"""A mass of 1, the largest there is: a sum over 2^20 logits stays below 2^63."""

_BINS_PER_NAT = tl.constexpr(8.0)
_SLACK = tl.constexpr(2.0**-20)
"""Relative width added to a bin's edges, more than rounding moves a logit."""

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_FIELDS = tl.constexpr(6)
_COARSE, _LOW, _HIGH, _MASS, _COUNT, _TIES = (tl.constexpr(i) for i in range(6))


@dataclass(frozen=True)
class Search:
    """Rows whose boundary is looked for, and how far that is. ``S`` rows in all, fewer or none of them listed."""

    order: Tensor
    """int64 ``[S]``, the listed entries first."""

    listed: Tensor
    """int64, how many are listed."""

    amount: Tensor
    """float64 ``[A]``: find the smallest value with less than this mass (or count) strictly above it."""

    by_count: bool
    state: Tensor
    """int64 ``[S, 6]``: bin of the first round, lowest and highest key, mass and count above, logits at the value."""

    mass: Tensor
    """int64 ``[S, bins]``, zeros between rounds."""

    counts: Tensor
    """int64 ``[S, bins]``, zeros between rounds."""

    @classmethod
    def of(cls, wanted: Tensor, amount: Tensor, *, by_count: bool, room: int | None = None) -> Search:
        """Of the entries where ``wanted [A]`` is true, not more than ``room``."""
        room = wanted.numel() if room is None else room
        device = wanted.device
        return cls(
            # stable, so that the order does not depend on the device
            (~wanted).to(torch.uint8).argsort(stable=True)[:room],
            wanted.sum(),
            amount,
            by_count,
            torch.zeros(room, _FIELDS.value, dtype=torch.int64, device=device),
            torch.zeros(room, _BINS, dtype=torch.int64, device=device),
            torch.zeros(room, _BINS, dtype=torch.int64, device=device),
        )

    def field(self, number: int) -> Tensor:
        """int64 ``[A]``; 0 where nothing was looked for."""
        found = torch.zeros(self.amount.shape, dtype=torch.int64, device=self.state.device)
        found[self.order] = self.state[:, number]
        return found

    def value(self) -> Tensor:
        """float32 ``[A]``"""
        key = self.field(_LOW.value) - (1 << 31)
        return torch.where(key < 0, key ^ 0x7FFFFFFF, key).to(torch.int32).view(torch.float32)

    def mass_above(self) -> Tensor:
        """float64 ``[A]``, mass strictly above the value."""
        return self.field(_MASS.value).double() / _UNIT.value

    def count_above(self) -> Tensor:
        """float64 ``[A]``"""
        return self.field(_COUNT.value).double()

    def ties(self) -> Tensor:
        """float64 ``[A]``, logits equal to the value."""
        return self.field(_TIES.value).double()


@triton.jit
def _coarse_bin(x, top, BINS: tl.constexpr):
    """Grows with the distance from the maximum, whatever is rounded."""
    return tl.minimum((top - x) * _BINS_PER_NAT, BINS - 1.0).to(tl.int32)


@triton.jit
def _histogram_kernel(
    logits,
    index,
    temperature,
    maximum,
    order,
    listed,
    state,
    mass,
    counts,
    columns,
    row_stride,
    per_split,
    FIRST: tl.constexpr,
    SCALED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    items = tl.load(listed).to(tl.int32) * SPLITS
    for item in range(tl.program_id(0), items, PROGRAMS):
        slot = tl.cast(item // SPLITS, tl.int64)
        entry = tl.load(order + slot)
        coarse = tl.load(state + slot * _FIELDS + _COARSE).to(tl.int32)
        low = tl.load(state + slot * _FIELDS + _LOW)
        high = tl.load(state + slot * _FIELDS + _HIGH)
        if FIRST or low < high:
            start_of_row = tl.load(index + entry) * row_stride
            top = tl.load(maximum + entry)
            first = (item % SPLITS) * per_split
            last = tl.minimum(first + per_split, columns)
            for start in range(first, last, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = load_scaled(logits, start_of_row + column, column < last, temperature, entry, SCALED)
                inside = x > -float("inf")
                bin = _coarse_bin(tl.where(inside, x, top), top, BINS).to(tl.int64)
                if not FIRST:
                    key = order_key(x)
                    inside = inside & (bin == coarse) & (key >= low) & (key <= high)
                    bin = (high - key) // ((high - low) // BINS + 1)
                share = tl.exp2((x - top) * LOG2_E).to(tl.float64)
                place = slot * BINS + bin
                tl.atomic_add(mass + place, (share * _UNIT + 0.5).to(tl.int64), mask=inside, sem="relaxed")
                tl.atomic_add(counts + place, inside.to(tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _narrow_kernel(
    order,
    listed,
    maximum,
    amount,
    state,
    mass,
    counts,
    FIRST: tl.constexpr,
    BY_COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BINS: tl.constexpr,
):
    for item in range(tl.program_id(0), tl.load(listed).to(tl.int32), PROGRAMS):
        slot = tl.cast(item, tl.int64)
        entry = tl.load(order + slot)
        mine = state + slot * _FIELDS
        low = tl.load(mine + _LOW)
        high = tl.load(mine + _HIGH)
        if FIRST or low < high:
            bins = tl.arange(0, BINS)
            masses = tl.load(mass + slot * BINS + bins)
            numbers = tl.load(counts + slot * BINS + bins)
            mass_before = tl.load(mine + _MASS) + tl.cumsum(masses, 0) - masses
            count_before = tl.load(mine + _COUNT) + tl.cumsum(numbers, 0) - numbers
            reached = count_before.to(tl.float64) if BY_COUNT else mass_before.to(tl.float64) / _UNIT
            possible = (reached < tl.load(amount + entry)) & (numbers > 0)
            bin = tl.max(tl.where(possible, bins, 0), 0)
            here = bins == bin
            tl.store(mine + _MASS, tl.sum(tl.where(here, mass_before, 0), 0))
            tl.store(mine + _COUNT, tl.sum(tl.where(here, count_before, 0), 0))
            tl.store(mine + _TIES, tl.sum(tl.where(here, numbers, 0), 0))
            if FIRST:
                top = tl.load(maximum + entry)
                slack = (tl.abs(top) + 64.0) * _SLACK
                upper = tl.minimum(top - bin / _BINS_PER_NAT + slack, top)
                lower = tl.where(bin == BINS - 1, _LOWEST, top - (bin + 1) / _BINS_PER_NAT - slack)
                tl.store(mine + _COARSE, bin.to(tl.int64))
                tl.store(mine + _LOW, order_key(lower))
                tl.store(mine + _HIGH, order_key(upper))
            else:
                width = (high - low) // BINS + 1
                high -= bin * width
                tl.store(mine + _LOW, tl.maximum(low, high - width + 1))
                tl.store(mine + _HIGH, high)
            tl.store(mass + slot * BINS + bins, tl.zeros((BINS,), tl.int64))
            tl.store(counts + slot * BINS + bins, tl.zeros((BINS,), tl.int64))


@triton.jit
def _count_kernel(
    logits, index, temperature, value, wanted, found, columns, row_stride, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + entry) != 0:
        start_of_row = tl.load(index + entry) * row_stride
        number = tl.full([], 0, tl.int64)
        equal_to = tl.load(value + entry)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            x = load_scaled(logits, start_of_row + column, inside, temperature, entry, SCALED)
            number += tl.sum((inside & (x == equal_to)).to(tl.int64), 0)
        tl.store(found + entry, number)


@triton.jit
def _locate_kernel(
    logits, index, temperature, value, wanted, found, columns, row_stride, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64)
    missing = tl.load(wanted + entry)
    if missing > 0:
        start_of_row = tl.load(index + entry) * row_stride
        equal_to = tl.load(value + entry)
        result = tl.full([], -1, tl.int64)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            x = load_scaled(logits, start_of_row + column, inside, temperature, entry, SCALED)
            equal = (inside & (x == equal_to)).to(tl.int64)
            hit = (equal > 0) & (tl.cumsum(equal, 0) == missing)
            result = tl.maximum(result, tl.max(tl.where(hit, column, -1), 0).to(tl.int64))
            missing -= tl.sum(equal, 0)
        tl.store(found + entry, result)


def histogram(
    logits: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    maximum: Tensor,
    search: Search,
    turn: int,
    *,
    block: int | None = None,
) -> None:
    """Add this rank's logits to the histograms of a round, 0 to ``ROUNDS - 1``."""
    columns, device = logits.shape[1], logits.device
    block = block or BLOCK
    launch(
        _histogram_kernel,
        (_PROGRAMS,),
        device,
        logits,
        index,
        maximum if temperature is None else temperature,
        maximum,
        search.order,
        search.listed,
        search.state,
        search.mass,
        search.counts,
        columns,
        logits.stride(0),
        triton.cdiv(triton.cdiv(columns, _SPLITS), block) * block,
        FIRST=turn == 0,
        SCALED=temperature is not None,
        PROGRAMS=_PROGRAMS,
        SPLITS=_SPLITS,
        BINS=_BINS,
        BLOCK=block,
    )


def narrow(search: Search, maximum: Tensor, turn: int) -> None:
    """Choose a bin of every listed row's histogram, which is over all ranks by now."""
    launch(
        _narrow_kernel,
        (_PROGRAMS,),
        maximum.device,
        search.order,
        search.listed,
        maximum,
        search.amount,
        search.state,
        search.mass,
        search.counts,
        FIRST=turn == 0,
        BY_COUNT=search.by_count,
        PROGRAMS=_PROGRAMS,
        BINS=_BINS,
    )


def count_equal(
    logits: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    value: Tensor,
    wanted: Tensor,
    *,
    block: int | None = None,
) -> Tensor:
    """int64 ``[A]``: how many logits of this rank equal ``value [A]`` in the rows where ``wanted [A]``; 0 elsewhere."""
    return _scan(_count_kernel, logits, index, temperature, value, wanted.to(torch.int8), 0, block)


def locate_equal(
    logits: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    value: Tensor,
    nth: Tensor,
    *,
    block: int | None = None,
) -> Tensor:
    """int64 ``[A]``: the column of each row's ``nth [A]`` logit, from 1, that equals its value; -1 for none."""
    return _scan(_locate_kernel, logits, index, temperature, value, nth, -1, block)


def _scan(
    kernel, logits: Tensor, index: Tensor, temperature: Tensor | None, value: Tensor, wanted: Tensor, none: int, block
) -> Tensor:
    found = torch.full(index.shape, none, dtype=torch.int64, device=logits.device)
    launch(
        kernel,
        (index.numel(),),
        logits.device,
        logits,
        index,
        value if temperature is None else temperature,
        value,
        wanted,
        found,
        logits.shape[1],
        logits.stride(0),
        SCALED=temperature is not None,
        BLOCK=block or BLOCK,
    )
    return found
