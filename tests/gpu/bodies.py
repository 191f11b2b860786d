"""What ranks do; functions of a module, so that fresh processes find them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_support.distributed.counts import global_counts
from megatron_support.distributed.errors import raise_together
from megatron_support.distributed.metrics import reduce_metrics
from megatron_support.errors import LogprobFault
from megatron_support.megatron.optimizer import adam_implementation
from megatron_support.metrics import EffectiveSampleSize, Max, Mean, MetricSet, Min, Sum
from tests.megatron.actor_setup import make_rollouts, make_step


def rank_device(kind: str, rank: int) -> torch.device:
    return torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")


def counts(rank: int, world: int, kind: str) -> list[int]:
    local = torch.tensor([2**24 + 1, 2**31 + rank, 2**53 + 1, 0], device=rank_device(kind, rank))
    return global_counts(local, dist.group.WORLD).tolist()


def metrics_of(values: torch.Tensor) -> MetricSet:
    x = values.double()
    return MetricSet(
        {
            "count": Sum(x.numel()),
            "mean": Mean(x.sum(), x.numel(), per="token"),
            "low": Min(x.min()),
            "high": Max(x.max()),
            "weights": EffectiveSampleSize(x.sum(), x.square().sum(), x.numel()),
        }
    )


def samples(rank: int) -> torch.Tensor:
    return torch.arange(1.0, 4.0 + rank) * (-1) ** rank


def metrics(rank: int, world: int, kind: str) -> tuple[dict[str, float], float]:
    """Of samples that differ by rank; and a maximum that is NaN on the last rank alone."""
    device = rank_device(kind, rank)
    reduced = reduce_metrics(metrics_of(samples(rank).to(device)), dist.group.WORLD, device).compute()
    worst = Max(torch.tensor(float("nan") if rank == world - 1 else 1.0, device=device))
    return reduced, reduce_metrics(MetricSet({"worst": worst}), dist.group.WORLD, device).compute()["worst"]


def fault(rank: int, world: int, kind: str) -> str:
    """The last rank meets it."""
    error = LogprobFault("prev_logprobs is nan") if rank == world - 1 else None
    try:
        raise_together(error, dist.group.WORLD, rank_device(kind, rank))
    except LogprobFault as found:
        return str(found)
    return "nothing was raised"


def actor_step(rank: int, world: int, kind: str, setup: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Steps on the same rollouts: their metrics, the previous log-probabilities of the last, and who did it."""
    step = make_step(device=kind, **setup)
    rollouts = make_rollouts()
    for _ in range(steps):
        result = step.step(rollouts)
    return {
        "metrics": result.metrics,
        "previous": result.rollouts.prev_logprobs,
        "device": step.model.device.type,
        "layers": type(step.model.bare_chunks[0].decoder.layers[0].mlp.linear_fc1).__module__,
        "adam": adam_implementation(),
    }
