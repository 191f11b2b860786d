"""One SUM and one MAX collective reduce all metrics of a step."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_support.metrics import MetricSet

_MAXIMA = 256
"""Maxima that travel with the checksum. Ranks that disagree must still enter a collective of one size."""


def reduce_metrics(metrics: MetricSet, group: ProcessGroup | None, device: torch.device) -> MetricSet:
    """Merge the metrics of all ranks by each metric's own rule; collective.

    The MAX collective has a fixed size and carries a checksum of names and kinds; the SUM collective, whose size
    depends on them, follows only where all ranks agree. More than 256 maxima take a second MAX.

    Args:
        metrics: this rank's; every rank must have the same names and kinds.
        group: None for a single rank.
        device: one that the group's backend works on.

    Raises:
        RuntimeError: on every rank, when ranks have different metrics.
    """
    if group is None:
        return metrics
    sums, maxima = metrics.pack(device)
    # a backend's maximum of NaN and a number may be either, so that a NaN is counted among the sums
    is_nan = maxima.isnan()
    maxima = torch.where(is_nan, -torch.inf, maxima)
    first = _first_maxima(metrics, maxima)
    dist.all_reduce(first, dist.ReduceOp.MAX, group=group)
    agreement, first = first.split([2, _MAXIMA])
    if agreement.sum().item() != 0:
        raise RuntimeError(
            f"ranks hold different metrics; this rank has {sorted(metrics)}. Every rank must report the same names, "
            "also with no valid token: report a metric with count 0 instead of leaving it out"
        )
    rest = maxima[_MAXIMA:]
    if rest.numel():
        dist.all_reduce(rest, dist.ReduceOp.MAX, group=group)
    maxima = torch.cat([first[: maxima.numel()], rest])
    totals = torch.cat([sums, is_nan.to(sums.dtype)])
    dist.all_reduce(totals, group=group)
    sums, nans = totals.split([sums.numel(), maxima.numel()])
    return metrics.unpack(sums, torch.where(nans > 0, torch.nan, maxima))


def _first_maxima(metrics: MetricSet, maxima: Tensor) -> Tensor:
    """float64 ``[2 + 256]``: checksum, -checksum (their maxima cancel only where all ranks agree), maxima, -inf."""
    signature = ";".join(f"{name}:{type(metrics[name]).__name__}" for name in sorted(metrics))
    checksum = float(zlib.crc32(signature.encode()))
    result = maxima.new_full((2 + _MAXIMA,), -torch.inf)
    result[:2] = maxima.new_tensor([checksum, -checksum])
    first = maxima[:_MAXIMA]
    result[2 : 2 + first.numel()] = first
    return result
