"""Which sequences go into which microbatch of which data-parallel rank: pure functions of the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_support.errors import RolloutError

Layout = Literal["packed", "padded"]


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

    Both assignments hand out the longest sequences first, each where the fewest tokens are so far (after LPT, Graham
    1969), so ranks and microbatches get nearly equal work. The plan depends on nothing but its arguments.

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
    ranks = _members(spread(sizes, data_parallel_size)[0], torch.arange(lengths.numel()), data_parallel_size)
    needed = [_bins_needed(sizes[members], capacity) for members in ranks]
    count = -(-max([1, *needed]) // count_multiple) * count_multiple
    return [_fill(sizes, members, n, count, capacity) for members, n in zip(ranks, needed, strict=True)]


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


def round_up(lengths: Tensor, multiple: int) -> Tensor:
    """Each length rounded up to a multiple."""
    return (lengths + multiple - 1) // multiple * multiple


def spread(sizes: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Distribute items over a number of bins with nearly equal sums.

    Items go out in rounds of ``bins``, longest first; in a round the largest goes where least is so far.

    Args:
        sizes: int64 ``[n]``.
        bins: number of bins, at least 1.

    Returns:
        int64 ``[n]``, the bin of each item, and int64 ``[bins]``, the sums.
    """
    order = torch.argsort(sizes, descending=True, stable=True)
    dealt, loads = _deal(sizes[order], bins)
    return torch.empty_like(dealt).index_copy_(0, order, dealt), loads


def _deal(descending: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """:func:`spread` of sizes that are sorted already."""
    loads = descending.new_zeros(bins)
    if bins == 1:
        return torch.zeros_like(descending), descending.sum()[None]
    rounds = []
    for sizes in descending.split(bins):
        emptiest = torch.argsort(loads, stable=True)[: sizes.numel()]
        rounds.append(emptiest)
        loads[emptiest] += sizes
    return torch.cat(rounds) if rounds else torch.zeros_like(descending), loads


def _members(bin_of: Tensor, members: Tensor, bins: int) -> list[Tensor]:
    """``members`` of each bin, ascending."""
    counts = torch.bincount(bin_of, minlength=bins).tolist()
    return list(members[torch.argsort(bin_of, stable=True)].split(counts))


def _bins_needed(sizes: Tensor, capacity: int) -> int:
    """The least number of bins with no sum above ``capacity``, as far as :func:`spread` finds it."""
    descending = sizes.sort(descending=True).values

    def fits(bins: int) -> bool:
        return int(_deal(descending, bins)[1].max()) <= capacity

    if not sizes.numel():
        return 1
    low = bins = -(-int(sizes.sum()) // capacity)
    step = 1
    while bins < sizes.numel() and not fits(bins):  # one each always fits
        low, bins, step = bins + 1, min(bins + step, sizes.numel()), 2 * step
    while low < bins:
        middle = (low + bins) // 2
        if fits(middle):
            bins = middle
        else:
            low = middle + 1
    return bins


def _fill(sizes: Tensor, members: Tensor, needed: int, count: int, capacity: int) -> list[Tensor]:
    """``members`` over exactly ``count`` microbatches, as even as fits; fillers where it only fits in ``needed``."""
    own = sizes[members]
    bin_of, loads = spread(own, count)
    if int(loads.max()) <= capacity:
        return _members(bin_of, members, count)
    return _members(spread(own, needed)[0], members, count)


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
