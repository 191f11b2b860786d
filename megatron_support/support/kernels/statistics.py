"""One read of the logits: maxima, sums of exponentials, entropy sums, group maxima and target logits.

Programs that share a row keep a running maximum, and rescale their sums when it grows. Groups of logits are summed in
float32, groups in float64. How a row is shared depends on the number of columns alone, so that a row's results do not
depend on the rows beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_support.support.kernels import launch
from megatron_support.support.kernels.common import DEPTH, LOG2_E, load_scaled

BLOCK = 4096
"""Columns per step."""

_SPLITS = 8
"""Programs that share a row."""


class RowSums(NamedTuple):
    """Of one part of a row each; all NaN where the row has no target, sums of 0 where the maximum is -inf."""

    maximum: Tensor
    """float32"""

    sums: Tensor
    """float64 ``[..., 1 or 2]``: sum of ``e = exp(x - maximum)``, and with entropy of ``e (x - maximum)``."""


@triton.jit
def _statistics_kernel(
    logits,
    index,
    temperature,
    targets,
    tops,
    sums,
    group_maxima,
    target_logits,
    first_id,
    vocabulary,
    columns,
    row_stride,
    groups,
    per_split,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MAXIMA: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    place = entry * SPLITS + split
    target = tl.load(targets + entry)
    top = tl.full([], float("nan"), tl.float32)
    mass = tl.full([], float("nan"), tl.float64)
    moment = tl.full([], float("nan"), tl.float64)
    if target >= 0:  # a row without a target is not read
        start_of_row = tl.load(index + entry) * row_stride
        top = tl.full([], -float("inf"), tl.float32)
        mass = tl.full([], 0.0, tl.float64)
        moment = tl.full([], 0.0, tl.float64)
        first = split * per_split
        last = tl.minimum(first + per_split, groups)
        for start in range(first, last, TILE):
            group = start + tl.arange(0, TILE)
            column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            inside = (group[:, None] < last) & (column < columns)
            x = load_scaled(logits, start_of_row + column, inside, temperature, entry, SCALED)
            highest = tl.max(x, 1)
            if MAXIMA:
                tl.store(group_maxima + entry * groups + group, highest, mask=group < last)
            grown = tl.maximum(top, tl.max(highest, 0))
            # -inf minus -inf is not a number, and a row of -inf alone is told by its maximum
            origin = tl.where(grown == -float("inf"), 0.0, grown)
            distance = x - origin
            share = tl.exp2(distance * LOG2_E)
            fall = top - origin
            scale = tl.exp2(fall * LOG2_E).to(tl.float64)
            if ENTROPY:
                bounded = tl.where(distance < DEPTH, DEPTH, distance)
                moved = tl.where(fall < DEPTH, DEPTH, fall).to(tl.float64)
                moment = (moment + mass * moved) * scale + tl.sum(tl.sum(share * bounded, 1).to(tl.float64), 0)
            mass = mass * scale + tl.sum(tl.sum(share, 1).to(tl.float64), 0)
            top = grown
        if split == 0:
            column = target - first_id
            held = (column >= 0) & (column < columns)
            value = load_scaled(logits, start_of_row + column, held, temperature, entry, SCALED)
            # an id beyond the vocabulary, which only a CPU can reject without waiting, becomes a fault
            tl.store(target_logits + entry, tl.where(target < vocabulary, value, float("nan")))
    elif split == 0:
        tl.store(target_logits + entry, float("nan"))
    tl.store(tops + place, top)
    if ENTROPY:
        tl.store(sums + place * 2, mass)
        tl.store(sums + place * 2 + 1, moment)
    else:
        tl.store(sums + place, mass)


def row_statistics(
    logits: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    targets: Tensor,
    *,
    first_id: int,
    vocabulary: int,
    entropy: bool,
    group: int | None,
    block: int | None = None,
) -> tuple[RowSums, Tensor, Tensor | None]:
    """Statistics of this rank's columns, in one read.

    Args:
        logits: ``[T, W]`` with unit stride along W.
        index: int64 ``[A]``, rows to work on.
        temperature: float32 ``[A]``; None for 1.
        targets: int64 ``[A]``, global ids; < 0 leaves the row unread.
        first_id: global id of the first column.
        group: consecutive columns, a power of two, whose maxima are wanted; None for none.
        block: columns per step.

    Returns:
        Sums ``[A]``, target logits ``[A]`` (-inf where another rank holds the target), and group maxima
        ``[A, ceil(W / group)]``, uninitialised where the row is not read.
    """
    count, columns, device = index.numel(), logits.shape[1], logits.device
    block = block or BLOCK
    size = group or min(32, block)
    tile = block // size
    groups = triton.cdiv(columns, size)
    tops = torch.empty(count, _SPLITS, dtype=torch.float32, device=device)
    sums = torch.empty(count, _SPLITS, 2 if entropy else 1, dtype=torch.float64, device=device)
    target_logits = torch.empty(count, dtype=torch.float32, device=device)
    maxima = torch.empty(count, groups, dtype=torch.float32, device=device) if group else None
    launch(
        _statistics_kernel,
        (count, _SPLITS),
        device,
        logits,
        index,
        tops if temperature is None else temperature,
        targets,
        tops,
        sums,
        tops if maxima is None else maxima,
        target_logits,
        first_id,
        vocabulary,
        columns,
        logits.stride(0),
        groups,
        triton.cdiv(triton.cdiv(groups, _SPLITS), tile) * tile,
        SCALED=temperature is not None,
        ENTROPY=entropy,
        MAXIMA=maxima is not None,
        SPLITS=_SPLITS,
        GROUP=size,
        TILE=tile,
    )
    return combined(RowSums(tops, sums), 1), target_logits, maxima


def combined(parts: RowSums, dim: int) -> RowSums:
    """The sums of parts of rows as the sums of the rows; a part without a finite logit adds 0."""
    maximum = parts.maximum.amax(dim)
    fall = (parts.maximum.double() - maximum.unsqueeze(dim).double()).clamp(min=-1e4)
    fall = fall.masked_fill(parts.maximum == -torch.inf, -1e4)
    scale = fall.exp()
    mass = parts.sums[..., 0] * scale
    sums = [mass.sum(dim)]
    if parts.sums.shape[-1] == 2:
        sums.append((parts.sums[..., 1] * scale + mass * fall).sum(dim))
    return RowSums(maximum, torch.stack(sums, -1))
