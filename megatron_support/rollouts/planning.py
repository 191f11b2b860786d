"""Which sequences go into which microbatch of which data-parallel rank: pure functions of the lengths."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapreplace
from typing import Any, Literal, TypeVar

import numpy
import torch
from torch import Tensor

from megatron_support.errors import RolloutError

Layout = Literal["packed", "padded"]
Array = numpy.ndarray[Any, Any]
Lengths = TypeVar("Lengths", Tensor, Array)


def plan_microbatches(
    lengths: Tensor,
    *,
    max_tokens: int,
    data_parallel_size: int,
    layout: Layout,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    count_multiple: int = 1,
    sample_ids: Sequence[str] | None = None,
) -> list[list[Tensor]]:
    """Assign a minibatch's sequences to data-parallel ranks and microbatches.

    Ranks get equally many sequences and nearly equal tokens (:func:`spread`). The fullest rank's count of microbatches,
    found by packing them tightly (:func:`pack`), is everybody's; over that count each rank hands out its longest
    sequences first, each where the fewest tokens are so far (LPT, Graham 1969), so that microbatches are nearly equal,
    and keeps the tight packing where that does not fit. The plan depends on nothing but its arguments.

    Args:
        lengths: int64 ``[n]``, tokens of each sequence.
        max_tokens: budget of one microbatch, padding included. Padded: every row is as wide as the longest sequence of
            the minibatch.
        data_parallel_size: number of ranks to share the sequences.
        layout: packed or padded.
        sequence_multiple: packed sequences (padded: rows) are padded to a multiple of this.
        total_multiple: the tokens of a microbatch (padded: of a row) are a multiple of this.
        count_multiple: the number of microbatches is a multiple of this (the interleaved schedule needs it).
        sample_ids: names for the error message.

    Returns:
        ``plan[data rank][microbatch]``: int64 indices into the minibatch, ascending. Every rank has the same number of
        microbatches, at least one; an empty tensor is a filler.

    Raises:
        RolloutError: sequences longer than the budget, by name.
    """
    if layout == "packed":
        sizes = round_up(lengths, sequence_multiple)
        capacity = max_tokens // total_multiple * total_multiple
    else:
        row = padded_row(lengths, sequence_multiple, total_multiple)
        sizes = torch.full_like(lengths, row)
        capacity = max_tokens
    _refuse_long_sequences(lengths, sizes, capacity, max_tokens, sample_ids)
    of = sizes.tolist()
    ranks = spread(of, data_parallel_size)
    own = [[of[item] for item in members] for members in ranks]
    packed = [pack(part, capacity) for part in own]
    count = -(-max(1, *map(len, packed)) // count_multiple) * count_multiple
    plan = []
    for members, part, bins in zip(ranks, own, packed, strict=True):
        microbatches = _fill(part, bins, count, capacity)
        indices = torch.tensor([members[item] for items in microbatches for item in items], dtype=torch.int64)
        plan.append(list(indices.split([*map(len, microbatches)])))
    return plan


def microbatch_shape(
    lengths: Tensor,
    plan: Sequence[Tensor],
    *,
    layout: Layout,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
) -> tuple[int, int]:
    """(rows, tokens of a row before the context-parallel split) that all microbatches of a rank's plan fit into.

    Pipeline stages exchange activations of one shape, so all microbatches of a pass are padded to it.
    """
    if layout == "padded":
        return max([1, *(len(m) for m in plan)]), padded_row(lengths, sequence_multiple, total_multiple)
    sizes = round_up(lengths, sequence_multiple)
    longest = max(int(sizes[members].sum()) for members in plan)
    return 1, max(-(-longest // total_multiple), 1) * total_multiple


def padded_row(lengths: Tensor, sequence_multiple: int, total_multiple: int) -> int:
    """Width of a row in the padded layout."""
    longest = int(round_up(lengths, sequence_multiple).max()) if lengths.numel() else 1
    return -(-longest // total_multiple) * total_multiple


def round_up(lengths: Lengths, multiple: int) -> Lengths:
    """Each length rounded up to a multiple."""
    return (lengths + multiple - 1) // multiple * multiple


def spread(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Distribute items over a number of bins with nearly equal sums and equal counts.

    Items go out in rounds of ``bins``, longest first; in a round the largest goes where least is so far. So sums differ
    by the largest item at most, and counts by one.

    Args:
        sizes: of the items.
        bins: number of bins, at least 1.

    Returns:
        The items of each bin, ascending.
    """
    if bins == 1:
        return [[*range(len(sizes))]]
    loads = [0] * bins
    members: list[list[int]] = [[] for _ in range(bins)]
    order = _longest_first(sizes)
    for start in range(0, len(order), bins):
        emptiest = sorted(range(bins), key=loads.__getitem__)
        for item, chosen in zip(order[start : start + bins], emptiest, strict=False):
            members[chosen].append(item)
            loads[chosen] += sizes[item]
    return [sorted(items) for items in members]


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute items over as few bins as best-fit decreasing finds: longest first, each where least room is left.

    It needs at most 11/9 of the fewest bins, plus 4 (Johnson 1974), and two of its bins never fit into one.

    Args:
        sizes: of the items, each at most ``capacity``.
        capacity: largest sum of a bin.

    Returns:
        The items of each bin, ascending.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # ascending, the keys of by_room
    for item in _longest_first(sizes):
        size = sizes[item]
        at = bisect_left(rooms, size)
        if at == len(rooms):
            chosen, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        bins[chosen].append(item)
        left = room - size
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(chosen)
    return [sorted(items) for items in bins]


def _level(sizes: Sequence[int], bins: int) -> tuple[list[list[int]], int]:
    """The items of each of a number of bins, and the largest sum: longest first, each where least is so far."""
    heap = [(0, chosen) for chosen in range(bins)]
    members: list[list[int]] = [[] for _ in range(bins)]
    for item in _longest_first(sizes):
        load, chosen = heap[0]
        members[chosen].append(item)
        heapreplace(heap, (load + sizes[item], chosen))
    return [sorted(items) for items in members], max(heap)[0]


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)  # stable


def _fill(sizes: Sequence[int], packed: list[list[int]], count: int, capacity: int) -> list[list[int]]:
    """Items over exactly ``count`` microbatches: as even as fits, else as packed, with fillers."""
    members, largest = _level(sizes, count)
    if largest <= capacity:
        return members
    return [*packed, *([] for _ in range(count - len(packed)))]


def _refuse_long_sequences(
    lengths: Tensor, sizes: Tensor, capacity: int, max_tokens: int, sample_ids: Sequence[str] | None
) -> None:
    long = (sizes > capacity).nonzero().flatten().tolist()
    if not long:
        return
    names = [f"{sample_ids[i] if sample_ids else f'#{i}'} ({int(lengths[i])} tokens)" for i in long[:5]]
    more = f" and {len(long) - 5} more" if len(long) > 5 else ""
    raise RolloutError(
        f"sequences must fit into a microbatch of max_tokens={max_tokens} (padding included, {int(sizes.max())} "
        f"needed), got {', '.join(names)}{more}; raise train.microbatch.max_tokens, set "
        "train.microbatch.truncate, or drop the sequences"
    )
