"""Which part of the vocabulary a rank holds, and the few small collectives over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """Columns ``[start, start + width)`` of a vocabulary of ``size`` tokens, one shard per rank of ``group``."""

    start: int
    """Global id of the first column of this rank."""

    width: int
    """Columns of this rank that are tokens; the columns after them are padding. May be 0."""

    size: int
    """Tokens in the vocabulary."""

    columns: int
    """Columns of this rank with padding, the same on every rank."""

    rank: int = 0
    """This rank in ``group``."""

    ranks: int = 1
    """Ranks of ``group``."""

    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None for one rank."""

    @classmethod
    def of(cls, columns: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> VocabularyShard:
        """The shard of a rank whose logits have ``columns`` columns.

        Raises:
            ValueError: the number of columns, the vocabulary size and the group cannot belong together.
        """
        ranks = 1 if group is None else dist.get_world_size(group)
        if ranks == 1:
            size = columns if vocab_size is None else vocab_size
            if not 0 < size <= columns:
                raise ValueError(
                    f"vocab_size must be in [1, {columns}] (one rank holds all {columns} columns), got {size}; pass "
                    "the logits of the whole vocabulary, or the tensor-parallel group that shares it"
                )
            return cls(0, size, size, columns)
        if vocab_size is None:
            raise ValueError(
                f"vocab_size is required when the vocabulary is split over {ranks} tensor-parallel ranks, got None; "
                "pass the number of tokens of the tokenizer, before padding"
            )
        if columns >= vocab_size:
            raise ValueError(
                f"the logits have {columns} columns on each of {ranks} tensor-parallel ranks, which already holds the "
                f"whole vocabulary of {vocab_size}: these are complete logits, not a shard; pass tp_group=None, or "
                "leave them vocabulary-parallel (parallel_output=True, no gather)"
            )
        if columns * ranks < vocab_size:
            raise ValueError(
                f"{ranks} tensor-parallel ranks with {columns} columns each hold {columns * ranks} logits a token, "
                f"fewer than vocab_size={vocab_size}; pass the tokenizer's vocabulary size and the logits' own group"
            )
        rank = dist.get_rank(group)
        start = columns * rank
        width = min(max(vocab_size - start, 0), columns)
        return cls(start, width, vocab_size, columns, rank, ranks, group)

    def width_of(self, rank: int) -> int:
        """Columns of another rank that are tokens."""
        return min(max(self.size - self.columns * rank, 0), self.columns)

    def gather(self, tensor: Tensor) -> Tensor:
        """``[...]`` of every rank as ``[ranks, ...]``, in rank order."""
        if self.ranks == 1:
            return tensor.unsqueeze(0)
        gathered = torch.empty((self.ranks, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather(list(gathered.unbind(0)), tensor.contiguous(), group=self.group)
        return gathered

    def gather_together(self, *tensors: Tensor) -> list[Tensor]:
        """``[A, n]`` tensors of any dtypes, each as ``[ranks, A, n]`` of every rank, in one collective."""
        if self.ranks == 1:
            return [tensor.unsqueeze(0) for tensor in tensors]
        parts = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        everyone = self.gather(torch.cat(parts, 1)).split([part.shape[1] for part in parts], -1)
        return [
            received.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
            for received, tensor in zip(everyone, tensors, strict=True)
        ]

    def maximum(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the ranks. A NaN on any rank is a NaN on all (a MAX all-reduce may drop it)."""
        return tensor if self.ranks == 1 else self.gather(tensor).amax(0)

    def total(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over the ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor
