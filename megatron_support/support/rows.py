"""The rows of a logits matrix that are worked on, walked over in chunks that stay in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634

_LOG2_E_SINGLE = 1.44269502162933349609375
"""``log2(e)`` as a float32, which is what a float32 operation makes of it."""

_MOST_OFFSET = 8192.0
"""Of larger maxima, the offset's rounding would overflow or hide the exponent."""

_CHUNK_ELEMENTS = 1 << 19
"""Elements of one chunk per CPU thread: the chunk and one buffer of its size fit the second and third level caches."""

_DEVICE_CHUNK_ELEMENTS = 1 << 26
"""Elements of one chunk on an accelerator, where launches cost more than cache misses."""


class Workspace:
    """Named scratch buffers that are reused from chunk to chunk of one call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; it overlaps every other one of the same name and dtype."""
        numel = 1
        for extent in shape:
            numel *= extent
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype] = torch.empty(numel, dtype=dtype, device=self._device)
        return buffer[:numel].view(shape)

    def clear(self) -> None:
        """Give the memory back, for what follows a pass over the logits."""
        self._buffers.clear()


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows: ``rows`` of the logits, which are entries ``at`` of the per-row tensors ``[A]``."""

    rows: slice
    at: slice

    @property
    def size(self) -> int:
        return self.at.stop - self.at.start


def chunk_rows(columns: int, device: torch.device) -> int:
    """Rows of one chunk of a matrix with that many columns."""
    elements = _CHUNK_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    return max(1, elements // max(columns, 1))


def split_rows(wanted: Tensor, columns: int, chunk_size: int | None = None) -> tuple[Chunk, ...]:
    """Chunks that cover the rows where ``wanted [T]`` is true, in order, none with an unwanted row."""
    return _split(_runs(wanted), columns, wanted.device, chunk_size)


def whole_rows(count: int, columns: int, device: torch.device, chunk_size: int | None = None) -> tuple[Chunk, ...]:
    """Chunks that cover ``count`` rows."""
    return _split([(0, count)], columns, device, chunk_size)


def _split(
    runs: list[tuple[int, int]], columns: int, device: torch.device, chunk_size: int | None
) -> tuple[Chunk, ...]:
    rows = chunk_rows(columns, device) if chunk_size is None else chunk_size
    chunks: list[Chunk] = []
    done = 0
    for start, stop in runs:
        for first in range(start, stop, rows):
            count = min(rows, stop - first)
            chunks.append(Chunk(slice(first, first + count), slice(done, done + count)))
            done += count
    return tuple(chunks)


def _runs(wanted: Tensor) -> list[tuple[int, int]]:
    """``(start, stop)`` of every run of true entries."""
    edge = torch.zeros(1, dtype=torch.int8, device=wanted.device)
    steps = torch.diff(wanted.to(torch.int8), prepend=edge, append=edge)
    starts, stops = (steps == 1).nonzero().flatten(), (steps == -1).nonzero().flatten()
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of columns inside a rank's shard; block edges are the same token ids for every split."""

    size: int
    first: int
    """First column of the first block."""

    count: int

    @classmethod
    def of(cls, start: int, width: int, vocabulary: int) -> Blocks:
        """Of the columns ``[start, start + width)``: eighths of the vocabulary where that is even, else of 2,048."""
        size = vocabulary // 8 if vocabulary % 64 == 0 else 2048
        first = -start % size
        return cls(size, first, max(width - first, 0) // size)


@dataclass(frozen=True)
class Rows:
    """Rows of ``logits [T, W]`` with their temperature. ``[A]`` tensors have one entry per row worked on."""

    logits: Tensor
    """The columns of this rank that are tokens; no gradient is recorded."""

    index: Tensor
    """int64 ``[A]``, the row of each entry."""

    chunks: tuple[Chunk, ...]

    temperature: Tensor | None
    """``[A, 1]`` or ``[1, 1]`` in the compute dtype; None where it is 1 for all rows."""

    dtype: torch.dtype
    """The compute dtype: float32, or float64 for float64 logits."""

    workspace: Workspace
    blocks: Blocks

    @property
    def columns(self) -> int:
        return self.logits.shape[1]

    def scaled(self, chunk: Chunk) -> Tensor:
        """``logits / temperature`` of a chunk, ``[c, W]``; read only, valid until the next call."""
        block = self.logits[chunk.rows]
        if self.temperature is None and block.dtype == self.dtype:
            return block
        out = self.workspace.take("scaled", tuple(block.shape), self.dtype)
        if self.temperature is None:
            return out.copy_(block)
        # a tensor, not a number: dividing by a number may multiply by its rounded inverse, which samplers do not
        temperature = self._temperature_of(chunk.at)
        if block.dtype == self.dtype:
            return torch.div(block, temperature, out=out)
        return out.copy_(block).div_(temperature)

    def temperatures(self) -> Tensor | None:
        """``[A]``; None where it is 1 for all rows."""
        if self.temperature is None:
            return None
        return self.temperature.squeeze(1).expand(self.index.numel()).contiguous()

    def singly(self, entries: Tensor) -> list[Chunk]:
        """One chunk for each of a few scattered entries ``[R]``."""
        rows = self.index[entries].tolist()
        return [
            Chunk(slice(row, row + 1), slice(entry, entry + 1))
            for row, entry in zip(rows, entries.tolist(), strict=True)
        ]

    def scaled_sample(self, chunk: Chunk, first: int, stride: int) -> Tensor:
        """:meth:`scaled` of every ``stride``-th column from ``first`` on."""
        picked = self.logits[chunk.rows, first::stride].to(self.dtype).contiguous()
        return picked if self.temperature is None else picked / self._temperature_of(chunk.at)

    def scaled_at(self, entries: Tensor, columns: Tensor) -> Tensor:
        """:meth:`scaled` of single logits: pairs of an entry and a column, ``[N]``."""
        picked = self.logits[self.index[entries], columns].to(self.dtype)
        if self.temperature is None:
            return picked
        temperature = self.temperature.squeeze(1)
        return picked / (temperature if temperature.numel() == 1 else temperature[entries])

    def _temperature_of(self, at: slice) -> Tensor:
        assert self.temperature is not None
        return self.temperature if self.temperature.shape[0] == 1 else self.temperature[at]


def exponentials(x: Tensor, maximum: Tensor, out: Tensor) -> Tensor:
    """``exp(x - maximum)`` divided by :func:`exponential_scale`, in ``out [c, W]``; 0 where x is -inf. maximum ``[c]``.

    In float32 on a CPU the difference and its factor are one fused multiply-add, ``2^(x log2(e) - offset)``. Its only
    systematic error is that of rounding the offset, the same for the whole row, which the scale undoes.

    exp2 is used because exp is forty times slower on a CPU where its result is denormal.
    """
    if not _fuses(x):
        return torch.sub(x, maximum[:, None], out=out).mul_(LOG2_E).exp2_()
    negated = maximum * -LOG2_E
    torch.add(negated[:, None], x, alpha=LOG2_E, out=out)
    for i, offset in enumerate(negated.tolist()):
        if abs(offset) > _MOST_OFFSET:
            torch.sub(x[i], maximum[i], out=out[i]).mul_(LOG2_E)
    return out.exp2_()


def exponential_scale(maximum: Tensor) -> Tensor | float:
    """float64 ``[c]``: what the results of :func:`exponentials` have to be multiplied by."""
    if not _fuses(maximum):
        return 1.0
    offset = maximum * LOG2_E
    rounding = (offset.double() - maximum.double() * _LOG2_E_SINGLE).exp2()
    # a row that holds an infinity or a NaN is at fault, and is NaN without a scale
    return torch.where(offset.abs() <= _MOST_OFFSET, rounding, 1.0)


def _fuses(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


def shift(x: Tensor, maximum: Tensor, out: Tensor) -> Tensor:
    """``x - maximum`` in ``out [c, W]``, bounded below where exp is 0 so that ``p * (x - maximum)`` is 0 at -inf."""
    floor = -104.0 if out.dtype == torch.float32 else -746.0
    return torch.sub(x, maximum[:, None], out=out).clamp_(min=floor)


def row_sums(mass: Tensor, blocks: Blocks, scratch: Tensor | None = None) -> Tensor:
    """float64 ``[c]``, sums of ``mass [c, W]``, whose memory takes partial sums unless ``scratch [>= c W / 2]`` does.

    A conversion to float64 costs more than the addition, so groups of 8 logits are added in float32 first: eighths of a
    block, element by element, which gives the same groups and bits wherever a rank's columns begin and end.
    """
    if mass.dtype == torch.float64 or blocks.count == 0:
        return mass.sum(-1, dtype=torch.float64)
    width = blocks.size
    last = blocks.first + blocks.count * width
    half = mass[:, blocks.first : last].unflatten(1, (blocks.count, 2, width // 2))
    part = half[:, :, 0]
    if scratch is not None:
        part = scratch[: part.numel()].view(part.shape)
    torch.add(half[:, :, 0], half[:, :, 1], out=part)
    for _ in range(2):
        width //= 2
        low = part[..., : width // 2]
        part = torch.add(low, part[..., width // 2 : width], out=low)
    total = part.sum((1, 2), dtype=torch.float64)
    if blocks.first > 0:
        total += mass[:, : blocks.first].sum(-1, dtype=torch.float64)
    if last < mass.shape[1]:
        total += mass[:, last:].sum(-1, dtype=torch.float64)
    return total
