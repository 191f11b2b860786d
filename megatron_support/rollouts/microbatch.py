"""Rollouts -> one microbatch of one rank. The shift by one token is made here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.batch import RolloutBatch, ragged_arange, select_support
from megatron_support.rollouts.planning import Array, Layout, round_up
from megatron_support.types import SamplingParams, TokenBatch


def build_microbatch(
    rollouts: RolloutBatch,
    indices: Tensor,
    *,
    layout: Layout,
    pad_to: tuple[int, int],
    context_rank: int = 0,
    context_size: int = 1,
    sequence_multiple: int = 1,
    columns: Sequence[str] = (),
) -> TokenBatch:
    """This rank's shard of a microbatch.

    The microbatch is laid out whole, targets are shifted inside each sequence, and only then cut for context
    parallelism, so the shift crosses no sequence and no shard border wrongly.

    Args:
        rollouts: the minibatch.
        indices: int64 ``[n]``, sequences of the microbatch; empty for a filler, which is all padding.
        layout: "packed": sequences end to end in one row; "padded": a sequence per row.
        pad_to: (rows, tokens of a row) before the context-parallel split, from :func:`microbatch_shape`.
        context_rank: this rank in the context-parallel group.
        context_size: size of that group, C: each sequence is cut in 2C chunks, rank r holds chunks r and 2C-1-r.
        sequence_multiple: packed sequences are padded to a multiple of this.
        columns: names of per-token columns of the batch to take along.
    """
    rows, width = pad_to
    chosen = indices.numpy()  # of arrays as small as these, numpy's calls cost a third of torch's
    segments = _segments(rollouts.lengths.numpy()[chosen], layout, pad_to, sequence_multiple)
    laid_out = _lay_out(rollouts, chosen, segments)
    if context_size > 1:
        held = context_positions(torch.from_numpy(segments), context_size, context_rank).numpy()
        laid_out = [column[held] for column in laid_out]
    source, target, position, sequence = laid_out
    inputs, targets = _Taker(source), _Taker(target)
    shape = (rows, width // context_size)
    sequence_ids = targets.fill(sequence, 0)
    token_index = torch.from_numpy(target)
    packed = layout == "packed"
    return TokenBatch(
        input_ids=inputs(rollouts.tokens, 0).view(shape),
        position_ids=torch.from_numpy(position).view(shape),
        targets=targets(rollouts.tokens, -1),
        response_mask=targets(rollouts.response_mask, False),
        sequence_ids=sequence_ids,
        token_index=token_index,
        sampling=_sampling(rollouts, sequence, targets),
        num_sequences=rollouts.num_sequences,
        columns={name: targets(getattr(rollouts, name), 0.0) for name in columns},
        cu_seqlens=_boundaries(segments) if packed else None,
        max_seqlen=int(segments.max()) if packed else None,
        support=None if rollouts.support is None else select_support(rollouts.support, token_index),
    )


def _segments(lengths: Array, layout: Layout, pad_to: tuple[int, int], sequence_multiple: int) -> Array:
    """int64 ``[>= n]``: tokens of each segment that the microbatch is laid out in, a sequence to each of the first."""
    rows, width = pad_to
    if layout == "padded":
        return numpy.full(rows, width)
    sizes = round_up(lengths, sequence_multiple)
    rest = rows * width - int(sizes.sum())
    return numpy.append(sizes, rest) if rest else sizes


def _boundaries(segments: Array) -> Tensor:
    """int32 ``[n + 1]``: where each segment begins, and where the last one ends."""
    boundaries = numpy.zeros(len(segments) + 1, dtype=numpy.int32)
    segments.cumsum(out=boundaries[1:])
    return torch.from_numpy(boundaries)


def context_positions(segments: Tensor, size: int, rank: int) -> Tensor:
    """Positions, in a row of segments, of the tokens that one context-parallel rank holds, in its order.

    Args:
        segments: int64 ``[n]``, tokens of each segment; multiples of ``2 * size`` where size > 1.
        size: context-parallel size.
        rank: context-parallel rank.

    Returns:
        int64 ``[sum of segments / size]``.

    Raises:
        ConfigurationError: a segment cannot be cut in ``2 * size`` equal chunks.
    """
    starts = segments.cumsum(0) - segments
    if size == 1:
        return ragged_arange(starts, segments)
    odd = segments[segments % (2 * size) != 0]
    if odd.numel():
        raise ConfigurationError(
            f"with context parallelism of {size} every padded sequence length must be a multiple of {2 * size}, "
            f"got {odd[:5].tolist()}; pad the sequences to it"
        )
    chunk = segments // (2 * size)
    first, second = starts + rank * chunk, starts + (2 * size - 1 - rank) * chunk
    return ragged_arange(torch.stack([first, second], 1).flatten(), chunk.repeat_interleave(2))


def _lay_out(rollouts: RolloutBatch, chosen: Array, segments: Array) -> list[Array]:
    """int64 ``[total]`` each of the unsplit microbatch: token index, target's token index, position, sequence.

    Token indices point into the batch's flat storage and are -1 where there is none. Positions are 0 at padding, and
    sequences are some sequence.

    Args:
        rollouts: the minibatch.
        chosen: int64 ``[n]``, its sequences in order, one at the start of each of the first segments.
        segments: int64 ``[>= n]``, tokens of each segment, padding included.
    """
    sequences = numpy.zeros_like(segments)
    sequences[: len(chosen)] = chosen
    lengths = rollouts.lengths.numpy()[sequences]
    lengths[len(chosen) :] = 0
    ends = segments.cumsum()
    starts = ends - segments
    position = numpy.arange(ends[-1])
    position -= numpy.repeat(starts, segments)
    source = numpy.repeat(rollouts.cu_seqlens.numpy()[sequences], segments)
    source += position
    target = source + 1
    target[(starts + lengths)[: len(chosen)] - 1] = -1  # nothing follows a sequence's last token
    if lengths.sum() < ends[-1]:
        padding = position >= numpy.repeat(lengths, segments)
        source[padding] = target[padding] = -1
        position[padding] = 0
    return [source, target, position, numpy.repeat(sequences, segments)]


class _Taker:
    """``values[index]``, and a missing value where the index is -1."""

    def __init__(self, index: Array) -> None:
        self._index = index
        self._absent = index < 0

    def __call__(self, values: Tensor, missing: float) -> Tensor:
        return self.fill(values.numpy().take(self._index, mode="clip"), missing)

    def fill(self, taken: Array, missing: float) -> Tensor:
        """``taken`` itself, with a missing value where there is no index."""
        taken[self._absent] = missing
        return torch.from_numpy(taken)


def _sampling(rollouts: RolloutBatch, sequence: Array, targets: _Taker) -> SamplingParams:
    """Numbers where all sequences of the minibatch agree, so that a filter that is off costs nothing; else tensors."""
    if rollouts.shared_sampling is not None:
        return rollouts.shared_sampling
    off = ((rollouts.temperature, 1.0), (rollouts.top_k, 0), (rollouts.top_p, 1.0))
    return SamplingParams(*(targets.fill(column.numpy()[sequence], value) for column, value in off))
