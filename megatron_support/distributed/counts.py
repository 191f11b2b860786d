"""Counts over ranks, exact past 2^24 (fp32) and 2^31 (Megatron's int32 token total)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def global_counts(local: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of int64 counts over a group, on every rank.

    Args:
        local: int64 ``[k]``, on the device the group's backend works on. Not changed.
        group: None for a single rank.
    """
    assert local.dtype == torch.int64, f"counts are int64, got {local.dtype}"
    total = local.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
