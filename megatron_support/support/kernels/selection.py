"""The K largest logits of every row, from the maxima of its groups.

They can all be taken inside the K groups with the largest maxima. The smallest of those maxima is a bar that at least K
logits of these groups reach; mostly few more do, and they are compacted in the order of their columns. Where ties or
neighbours make them too many, the bar is raised to the K-th largest logit. No atomics: equal inputs give equal results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_support.support.kernels import launch
from megatron_support.support.kernels.common import KEYS, kth_largest, load_scaled, order_key
from megatron_support.support.kernels.statistics import BLOCK

_LARGEST_GROUP = 128
_GROUPS_PER_CANDIDATE = 2


def group_size(count: int, columns: int) -> int:
    """Columns per group for that many candidates: a power of two that leaves enough groups to tell them apart."""
    size = _LARGEST_GROUP
    while size > 1 and columns // size < _GROUPS_PER_CANDIDATE * count:
        size //= 2
    return size


@triton.jit
def _choose_groups_kernel(group_maxima, targets, chosen, bars, groups, COUNT: tl.constexpr, ROOM: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    if tl.load(targets + entry) >= 0:
        group = tl.arange(0, ROOM)
        inside = group < groups
        keys = order_key(tl.load(group_maxima + entry * groups + group, mask=inside, other=-float("inf")))
        bar = kth_largest(keys, inside, COUNT)
        above = inside & (keys > bar)
        equal = inside & (keys == bar)
        wanted = COUNT - tl.sum(above.to(tl.int32), 0)
        taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= wanted))
        slot = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen + entry * COUNT + slot, group, mask=taken)
        tl.store(bars + entry, bar)


@triton.jit
def _load_chosen(
    logits,
    start_of_row,
    temperature,
    entry,
    chosen,
    start,
    columns,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits of the chosen groups: values, columns, and which are there."""
    place = start + tl.arange(0, BLOCK)
    slot = place // GROUP
    group = tl.load(chosen + entry * COUNT + slot, mask=slot < COUNT, other=0)
    column = group * GROUP + place % GROUP
    inside = (slot < COUNT) & (column < columns)
    return load_scaled(logits, start_of_row + column, inside, temperature, entry, SCALED), column, inside


@triton.jit
def _reached(
    logits,
    start_of_row,
    temperature,
    entry,
    chosen,
    bar,
    columns,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many logits of the chosen groups reach the bar."""
    total = tl.full([], 0, tl.int32)
    for start in range(0, COUNT * GROUP, BLOCK):
        x, _, inside = _load_chosen(
            logits, start_of_row, temperature, entry, chosen, start, columns, SCALED, COUNT, GROUP, BLOCK
        )
        total += tl.sum((inside & (order_key(x) >= bar)).to(tl.int32), 0)
    return total


@triton.jit
def _select_kernel(
    logits,
    index,
    temperature,
    targets,
    chosen,
    bars,
    values,
    places,
    columns,
    row_stride,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    if tl.load(targets + entry) >= 0:
        row = tl.load(index + entry) * row_stride
        bar = tl.load(bars + entry)
        reached = _reached(logits, row, temperature, entry, chosen, bar, columns, SCALED, COUNT, GROUP, BLOCK)
        if reached > ROOM:
            bar = tl.full([], 0, tl.int64)
            step = tl.full([], KEYS, tl.int64)
            for _ in range(32):
                step = step // 2
                trial = bar + step
                reached = _reached(logits, row, temperature, entry, chosen, trial, columns, SCALED, COUNT, GROUP, BLOCK)
                bar = tl.where(reached >= COUNT, trial, bar)
        # what is above the bar comes first, then what equals it, as far as there is room
        next_above = tl.full([], 0, tl.int32)
        next_equal = _reached(logits, row, temperature, entry, chosen, bar + 1, columns, SCALED, COUNT, GROUP, BLOCK)
        for start in range(0, COUNT * GROUP, BLOCK):
            x, column, inside = _load_chosen(
                logits, row, temperature, entry, chosen, start, columns, SCALED, COUNT, GROUP, BLOCK
            )
            keys = order_key(x)
            above = (inside & (keys > bar)).to(tl.int32)
            equal = (inside & (keys == bar)).to(tl.int32)
            slot = tl.where(above > 0, next_above + tl.cumsum(above, 0), next_equal + tl.cumsum(equal, 0)) - 1
            taken = ((above + equal) > 0) & (slot < ROOM)
            tl.store(values + entry * ROOM + slot, x, mask=taken)
            tl.store(places + entry * ROOM + slot, column.to(tl.int64), mask=taken)
            next_above += tl.sum(above, 0)
            next_equal += tl.sum(equal, 0)


def largest_logits(
    logits: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    targets: Tensor,
    group_maxima: Tensor,
    group: int,
    count: int,
    *,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``count`` largest scaled logits ``[A, count]`` of every row, descending, and their columns (int64).

    Args:
        targets: int64 ``[A]``; < 0 leaves the row unread, with -inf and column 0 for all.
        group_maxima: of groups of ``group`` columns, as :func:`row_statistics` gives them.
        count: at most the number of columns.
    """
    rows, columns, device = index.numel(), logits.shape[1], logits.device
    block = block or BLOCK
    groups = group_maxima.shape[1]
    room = triton.next_power_of_2(count + count // 2)
    chosen = torch.empty(rows, count, dtype=torch.int32, device=device)
    bars = torch.empty(rows, dtype=torch.int64, device=device)
    values = torch.full((rows, room), -torch.inf, dtype=torch.float32, device=device)
    places = torch.zeros(rows, room, dtype=torch.int64, device=device)
    width = triton.next_power_of_2(groups)
    # a program holds all of a row's maxima in registers
    sizes = {"COUNT": count, "ROOM": width, "num_warps": 4 if width <= 4096 else 16}
    launch(_choose_groups_kernel, (rows,), device, group_maxima, targets, chosen, bars, groups, **sizes)
    launch(
        _select_kernel,
        (rows,),
        device,
        logits,
        index,
        bars if temperature is None else temperature,
        targets,
        chosen,
        bars,
        values,
        places,
        columns,
        logits.stride(0),
        SCALED=temperature is not None,
        COUNT=count,
        GROUP=group,
        ROOM=room,
        BLOCK=block,
    )
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], places.gather(1, order[:, :count])
