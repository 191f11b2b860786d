"""One SUM and one MAX collective reduce all metrics of a step."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_support.metrics import MetricSet


def reduce_metrics(metrics: MetricSet, group: ProcessGroup | None, device: torch.device) -> MetricSet:
    """Merge the metrics of all ranks by each metric's own rule.

    Args:
        metrics: this rank's; every rank must have the same names and kinds.
        group: None for a single rank.
        device: one that the group's backend works on.

    Raises:
        RuntimeError: on every rank, when ranks have different metrics. The vectors' lengths are made equal first by a
            comparison of checksums, so nothing hangs.
    """
    if group is None:
        return metrics
    sums, maxima = metrics.pack(device)
    # the checksum travels as (value, -value): their maxima cancel only where all ranks agree
    checksum = float(zlib.crc32(_signature(metrics).encode()))
    agreement = torch.tensor([checksum, -checksum], dtype=torch.float64, device=device)
    dist.all_reduce(agreement, dist.ReduceOp.MAX, group=group)
    if agreement.sum().item() != 0:
        raise RuntimeError(
            f"ranks hold different metrics; this rank has {sorted(metrics)}. Every rank must report the same names, "
            "also with no valid token: report a metric with count 0 instead of leaving it out"
        )
    # a backend's maximum of NaN and a number may be either, so that a NaN is counted among the sums
    is_nan = maxima.isnan()
    totals = torch.cat([sums, is_nan.to(sums.dtype)])
    maxima = torch.where(is_nan, -torch.inf, maxima)
    dist.all_reduce(totals, group=group)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    sums, nans = totals.split([sums.numel(), maxima.numel()])
    return metrics.unpack(sums, torch.where(nans > 0, torch.nan, maxima))


def _signature(metrics: MetricSet) -> str:
    return ";".join(f"{name}:{type(metrics[name]).__name__}" for name in sorted(metrics))
