"""Which sequences go into which optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_support.errors import ConfigurationError


def split_minibatches(num_sequences: int, minibatches: int, *, seed: int | None = None) -> list[Tensor]:
    """Cut S sequences into minibatches whose sizes differ by one at most.

    Args:
        num_sequences: S.
        minibatches: number of parts.
        seed: shuffle first, by this seed; None keeps the order.

    Returns:
        int64 indices of each part.

    Raises:
        ConfigurationError: more minibatches than sequences.
    """
    if not 1 <= minibatches <= num_sequences:
        raise ConfigurationError(
            f"minibatches must be from 1 to the number of sequences of a step ({num_sequences}), got {minibatches}; "
            "lower train.minibatches or take more sequences per step"
        )
    order = torch.arange(num_sequences)
    if seed is not None:
        order = torch.randperm(num_sequences, generator=torch.Generator().manual_seed(seed))
    return list(torch.tensor_split(order, minibatches))
