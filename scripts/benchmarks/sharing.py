"""Planning, packing and counting of many sequences for many ranks, simulated in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_support.config.recipe import MicrobatchConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.minibatch import prepare_minibatch
from megatron_support.rollouts import RolloutBatch
from megatron_support.rollouts.planning import plan_microbatches

CPU = torch.device("cpu")
READ_BY_PPO = ("generation_logprobs", "prev_logprobs", "advantages")


def lengths_of(kind: str, count: int, longest: int) -> Tensor:
    """``even``: any length alike; ``long tail``: a half below a tenth of the longest, one in twenty cut off at it."""
    generator = torch.Generator().manual_seed(0)
    if kind == "even":
        return torch.randint(2, longest + 1, (count,), generator=generator)
    draws = torch.randn(count, generator=generator)
    return (longest / 12 * (1.5 * draws).exp()).long().clamp(2, longest)


@dataclass(frozen=True)
class Sharing:
    """Of one minibatch over ``ranks`` data-parallel ranks."""

    planning: float
    """Seconds of the plan for all ranks, which every rank makes."""
    preparing: float
    """Seconds of rank 0's whole preparation: the plan, its counts, every one of its microbatches built once."""
    microbatches: int
    """Of each rank."""
    least: int
    """Microbatches of each rank if tokens could be cut anywhere."""
    padding: float
    """Share of rank 0's tokens that is padding."""
    imbalance: float
    """Tokens of the fullest rank over the mean."""


def measure_sharing(rollouts: RolloutBatch, ranks: int, budget: int, layout: str = "packed") -> Sharing:
    """One preparation as rank 0 of ``ranks`` that do not exist: collectives return at once."""
    lengths = rollouts.lengths
    rollouts = rollouts.with_columns(**dict.fromkeys(READ_BY_PPO, rollouts.generation_logprobs))
    microbatch = MicrobatchConfig.from_dict({"max_tokens": budget, "layout": layout})
    started = time.process_time()
    plan = plan_microbatches(lengths, max_tokens=budget, data_parallel_size=ranks, layout=layout)
    planning = time.process_time() - started
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        groups = ParallelGroups(data=dist.group.WORLD, data_context=dist.group.WORLD, world=dist.group.WORLD)
        started = time.process_time()
        minibatch = prepare_minibatch(rollouts, microbatch=microbatch, groups=groups, device=CPU, columns=READ_BY_PPO)
        for _ in minibatch.microbatches:  # built one at a time, as a schedule asks for them
            pass
        preparing = time.process_time() - started
    finally:
        dist.destroy_process_group()
    loads = torch.stack([lengths[torch.cat(members)].sum() for members in plan])
    slots = len(minibatch) * minibatch.micro_batch_size * minibatch.seq_length
    return Sharing(
        planning=planning,
        preparing=preparing,
        microbatches=len(minibatch),
        least=-(-int(lengths.sum()) // (ranks * budget)),
        padding=1 - int(loads[0]) / slots,
        imbalance=float(loads.max() / loads.double().mean()),
    )
