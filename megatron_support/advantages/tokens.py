"""What every estimator shares: which tokens count, sums along a sequence, and whitening."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.errors import LogprobFault, RolloutError

GlobalSum = Callable[[Tensor], Tensor]
"""Sums a float64 vector over data-parallel ranks. Every rank calls it the same number of times, also with no data."""


@dataclass(frozen=True, kw_only=True)
class ResponseTokens:
    """The response tokens of flat tokens ``[N]``, in order, as rows of sequences.

    Prompt and environment tokens between them are left out: a recursion along a row steps from one response token to
    the next.
    """

    index: Tensor
    """int64 ``[R]``, positions of the response tokens in the flat tokens, by sequence."""
    row: Tensor
    """int64 ``[R]``, their sequence."""
    column: Tensor
    """int64 ``[R]``, their place among the response tokens of their sequence."""
    lengths: Tensor
    """int64 ``[sequences]``, response tokens of each."""
    total: int
    """N."""

    def rows(self, values: Tensor) -> Tensor:
        """Flat ``[N]`` as ``[sequences, longest]`` float64, 0 beyond a response's end."""
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        padded = torch.zeros(self.lengths.numel(), longest, dtype=torch.float64, device=values.device)
        padded[self.row, self.column] = values[self.index].double()
        return padded

    def flat(self, padded: Tensor) -> Tensor:
        """``[sequences, longest]`` as flat ``[N]``, 0 at other tokens."""
        result = padded.new_zeros(self.total)
        result[self.index] = padded[self.row, self.column]
        return result

    def place_at_end(self, per_sequence: Tensor) -> Tensor:
        """``[sequences, longest]``: each sequence's value at its last response token."""
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        padded = torch.zeros(self.lengths.numel(), longest, dtype=torch.float64, device=per_sequence.device)
        present = (self.lengths > 0).nonzero().reshape(-1)
        padded[present, self.lengths[present] - 1] = per_sequence[present].double()
        return padded


def response_tokens(response_mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> ResponseTokens:
    """Find the response tokens.

    Args:
        response_mask: ``[N]``, any dtype.
        sequence_ids: int64 ``[N]``; the tokens of one sequence are in order.
        num_sequences: how many.
    """
    index = (response_mask != 0).nonzero().reshape(-1)
    row = sequence_ids[index]
    order = torch.argsort(row, stable=True)
    index, row = index[order], row[order]
    lengths = torch.bincount(row, minlength=num_sequences)
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(row.numel(), device=row.device) - starts[row]
    return ResponseTokens(index=index, row=row, column=column, lengths=lengths, total=response_mask.numel())


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Return to go along each row.

    Formula: ``G_t = r_t + gamma G_{t+1}``.

    Args:
        rewards: ``[sequences, longest]``.
        gamma: discount.
    """
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
    return returns


def whiten(values: Tensor, mask: Tensor, *, global_sum: GlobalSum | None = None) -> Tensor:
    """Zero mean and unit variance over the masked entries of all data-parallel ranks.

    Formula: ``(x - mean) / std``, std unbiased; where fewer than two entries or no spread exist, ``x - mean``.

    Args:
        values: any shape.
        mask: bool, the same shape; before exclusion, so that it does not depend on the trainer's filter.
        global_sum: sums over ranks; None for one rank. Called twice, whatever this rank holds.

    Returns:
        float64, 0 where the mask is False.
    """
    reduce = global_sum or (lambda vector: vector)
    chosen = torch.where(mask, values.double(), 0.0)
    count, total = reduce(torch.stack([mask.sum().double(), chosen.sum()])).unbind()
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, values.double() - mean, 0.0)
    squares = reduce(centred.square().sum().reshape(1))[0]
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    # Equal entries leave a spread of rounding errors only: that is none.
    spread = std > 1e-12 * mean.abs()
    return centred / torch.where(spread, std, 1.0)


def require_finite(name: str, values: Tensor | None, mask: Tensor, sequence_ids: Tensor, estimator: str) -> Tensor:
    """The column, or an error that says what is wrong with it.

    Raises:
        RolloutError: the batch has no such column.
        LogprobFault: an entry under the mask is not finite.
    """
    if values is None:
        raise RolloutError(
            f"{estimator} advantages need the column {name}, got a batch without it; add the column or use another type"
        )
    wrong = (mask & ~torch.isfinite(values)).nonzero().reshape(-1)
    if wrong.numel():
        first = int(wrong[0])
        raise LogprobFault(
            f"{name} at token {first} of sequence {int(sequence_ids[first])} is {float(values[first])}, it must be "
            f"finite ({wrong.numel()} such); repair the column"
        )
    return values
