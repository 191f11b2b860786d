"""That every rank was given the same batch, which everything after it relies on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.config.loss import ActorLossConfig
from megatron_support.distributed.errors import raise_together
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import RolloutError
from megatron_support.megatron.faults import find_rollout_faults
from megatron_support.rollouts.batch import PER_SEQUENCE, PER_TOKEN, RolloutBatch

_COLUMNS = (
    "cu_seqlens",
    *PER_TOKEN,
    *(name for name in PER_SEQUENCE if name not in ("sample_ids", "prompts", "responses")),
)


def check_same_rollouts(
    rollouts: RolloutBatch, config: ActorLossConfig, groups: ParallelGroups, device: torch.device
) -> None:
    """Refuse a batch that differs between ranks, for example because a file is damaged on one machine.

    Costs one reduction of a few numbers. A NaN on one rank alone is named as the fault it is.

    Args:
        rollouts: this rank's.
        config: what the loss reads.
        groups: the ranks' layout.
        device: one that the groups' backend works on.

    Raises:
        RolloutError, LogprobFault: on every rank with the same message.
    """
    if groups.world_size == 1:
        return
    values = [getattr(rollouts, name) for name in _COLUMNS]
    kept = rollouts.support
    sums = [checksum(value) for value in (*values, *((None, None) if kept is None else (kept.token_ids, kept.offsets)))]
    own = torch.tensor(sums, dtype=torch.int64, device=device)
    extremes = torch.stack([own, -own])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=groups.world)
    differing = (extremes[0] != -extremes[1]).cpu().tolist()
    if not any(differing):
        return
    fault = None if differing[0] else find_rollout_faults(rollouts, config)
    names = [name for name, differs in zip((*_COLUMNS, "support", "support"), differing, strict=True) if differs]
    mismatch = RolloutError(
        f"every rank must be given the same rollouts, got others in {', '.join(dict.fromkeys(names))} on some; read "
        "the same files on every machine, and let rewards depend on nothing but the response"
    )
    raise_together(None if fault is None else fault.error, groups.world, device)
    raise_together(mismatch, groups.world, device)


def checksum(values: Tensor | None) -> int:
    """A number below 2^62 that depends on every bit of a tensor and on its place; -1 for None."""
    if values is None:
        return -1
    words = values.contiguous().view(-1)
    if words.is_floating_point():
        words = words.float().view(torch.int32)
    words = words.long()
    # multiplication by an odd number and wrap-around mix the bits of value and place; sums wrap the same everywhere
    places = torch.arange(1, words.numel() + 1) * 0x9E3779B97F4A7C1
    mixed = (words + places) * -0x61C8864680B583EB
    mixed = mixed ^ (mixed >> 29)
    total = int((mixed * 0xBF58476D1CE4E5B).sum()) if words.numel() else 0
    return (total ^ words.numel()) & (2**62 - 1)
