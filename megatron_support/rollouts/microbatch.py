"""Rollouts -> one microbatch of one rank. The shift by one token is made here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.batch import RolloutBatch, ragged_arange, select_support
from megatron_support.rollouts.planning import Layout, round_up
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
    total = rows * width
    if layout == "packed":
        sizes = round_up(rollouts.lengths[indices], sequence_multiple)
        cu_seqlens = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        if int(cu_seqlens[-1]) < total:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([total])])
        segments = cu_seqlens.diff()
    else:
        cu_seqlens = None
        segments = torch.full((rows,), width)
    laid_out = _lay_out(rollouts, indices, segments)
    if context_size > 1:
        held = context_positions(segments, context_size, context_rank)
        laid_out = [column.index_select(0, held) for column in laid_out]
    source, target, position, sequence = laid_out
    inputs, targets = _Taker(source), _Taker(target)
    shape = (rows, width // context_size)
    return TokenBatch(
        input_ids=inputs(rollouts.tokens, 0).view(shape),
        position_ids=position.view(shape),
        targets=targets(rollouts.tokens, -1),
        response_mask=targets(rollouts.response_mask, False),
        sequence_ids=targets.fill(sequence, 0),
        token_index=target,
        sampling=_sampling(rollouts, sequence, targets),
        num_sequences=rollouts.num_sequences,
        columns={name: targets(getattr(rollouts, name), 0.0) for name in columns},
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int32),
        max_seqlen=None if cu_seqlens is None else int(segments.max()),
        support=None if rollouts.support is None else select_support(rollouts.support, target),
    )


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


def _lay_out(rollouts: RolloutBatch, indices: Tensor, segments: Tensor) -> list[Tensor]:
    """int64 ``[total]`` each of the unsplit microbatch: token index, target's token index, position, sequence.

    Token indices point into the batch's flat storage and are -1 where there is none. Positions are 0 at padding, and
    sequences are some sequence.

    Args:
        rollouts: the minibatch.
        indices: int64 ``[n]``, its sequences in order, one at the start of each of the first segments.
        segments: int64 ``[>= n]``, tokens of each segment, padding included.
    """
    sizes, chosen = segments.numpy(), indices.numpy()  # of small arrays, numpy's calls cost a third of torch's
    lengths, first, sequences = numpy.zeros((3, len(sizes)), dtype=numpy.int64)
    lengths[: len(chosen)] = rollouts.lengths.numpy()[chosen]
    first[: len(chosen)] = rollouts.cu_seqlens.numpy()[chosen]
    sequences[: len(chosen)] = chosen
    ends = sizes.cumsum()
    starts = ends - sizes
    position = numpy.arange(ends[-1])
    source = numpy.repeat(first - starts, sizes)
    source += position
    position -= numpy.repeat(starts, sizes)
    target = source + 1
    target[(starts + lengths - 1)[lengths > 0]] = -1  # nothing follows a sequence's last token
    if lengths.sum() < ends[-1]:
        padding = position >= numpy.repeat(lengths, sizes)
        for column, missing in ((source, -1), (target, -1), (position, 0)):
            numpy.copyto(column, missing, where=padding)
    return [torch.from_numpy(column) for column in (source, target, position, numpy.repeat(sequences, sizes))]


class _Taker:
    """``values[index]``, and a missing value where the index is -1."""

    def __init__(self, index: Tensor) -> None:
        self._present = index >= 0
        self._index = index.clamp_min(0)

    def __call__(self, values: Tensor, missing: float) -> Tensor:
        return self.fill(values.index_select(0, self._index), missing)

    def fill(self, taken: Tensor, missing: float) -> Tensor:
        """``taken``, with a missing value where there is no index."""
        if taken.dtype == torch.bool and not missing:
            return taken & self._present  # a quarter of the time of choosing
        return torch.where(self._present, taken, missing)


def _sampling(rollouts: RolloutBatch, sequence: Tensor, targets: _Taker) -> SamplingParams:
    """Numbers where all sequences of the minibatch agree, so that a filter that is off costs nothing; else tensors."""
    if rollouts.shared_sampling is not None:
        return rollouts.shared_sampling
    off = ((rollouts.temperature, 1.0), (rollouts.top_k, 0), (rollouts.top_p, 1.0))
    return SamplingParams(*(targets.fill(column[sequence], value) for column, value in off))
