"""From what microbatches left behind to numbers that are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist

from megatron_support.distributed.groups import ParallelGroups
from megatron_support.distributed.metrics import reduce_metrics
from megatron_support.megatron.loss_function import MegatronActorLoss, MicrobatchRecord
from megatron_support.metrics import MetricSet, Sum


@dataclass(frozen=True, kw_only=True)
class MinibatchOutcome:
    """One minibatch over all ranks, the same on every rank."""

    metrics: MetricSet
    loss: float
    """The loss; under ``survivors`` still a sum, to be divided by the surviving count."""
    survivors: int
    """Surviving tokens or sequences, whichever the aggregation counts."""
    faults: int
    """Log-probabilities that must be finite and are not."""


def minibatch_outcome(
    records: Sequence[MicrobatchRecord], loss: MegatronActorLoss, groups: ParallelGroups, device: torch.device
) -> MinibatchOutcome:
    """Reduce over data- and context-parallel ranks, and make known on every pipeline stage.

    Costs one SUM and one MAX collective on the last stage, and one broadcast down the pipeline; whether any rank met a
    fault comes with them.
    """
    reduced = MetricSet()
    if groups.is_last_stage:
        local = reduce(MetricSet.merge, (_record_metrics(record, loss) for record in records))
        reduced = reduce_metrics(local, groups.data_context, device)
    reduced = _from_last_stage(reduced, groups)
    own = {name: reduced[name].compute() for name in _OWN}
    return MinibatchOutcome(
        metrics=MetricSet({name: metric for name, metric in reduced.items() if name not in _OWN}),
        loss=own["loss"],
        survivors=int(own["survivors"]),
        faults=int(own["faults"]),
    )


_OWN = ("loss", "survivors", "faults")


def _record_metrics(record: MicrobatchRecord, loss: MegatronActorLoss) -> MetricSet:
    own = {
        "loss": Sum(record.loss),
        "survivors": Sum(loss.survivor_count(record)),
        "faults": Sum(record.faults),
    }
    return record.metrics | own


def _from_last_stage(metrics: MetricSet, groups: ParallelGroups) -> MetricSet:
    if groups.pipeline is None or groups.pipeline.size() == 1:
        return metrics
    box: list[MetricSet | None] = [metrics if groups.is_last_stage else None]
    dist.broadcast_object_list(box, src=groups.last_stage_rank, group=groups.pipeline)
    assert box[0] is not None
    return box[0]
