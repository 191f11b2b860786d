"""Which layouts a check runs: a pure function of the number of ranks and the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_support.config.recipe import MicrobatchConfig, ParallelConfig
from megatron_support.errors import ConfigurationError

Fits = Callable[[ParallelConfig], None]
"""Raises ConfigurationError where a model cannot be laid out so."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How model and optimizer lie over the ranks."""

    parallel: ParallelConfig
    distributed_optimizer: bool = False

    def describe(self, world: int) -> str:
        """``TP2 PP2 VPP2 DP2 SP DistOpt``, sizes of 1 left out."""
        parallel = self.parallel
        data = world // (parallel.tensor * parallel.pipeline * parallel.context)
        sizes = {
            "TP": parallel.tensor,
            "PP": parallel.pipeline,
            "VPP": parallel.virtual_pipeline or 1,
            "CP": parallel.context,
            "DP": data,
        }
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words += ["SP"] if parallel.sequence else []
        words += ["DistOpt"] if self.distributed_optimizer else []
        return " ".join(words) or "one rank"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step under a layout: which loss, and how its batch is cut."""

    loss: str
    """A name of :class:`Problem.losses`."""
    microbatch: MicrobatchConfig

    def describe(self) -> str:
        return f"{self.microbatch.layout} {self.microbatch.max_tokens}"


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Token budgets of a microbatch."""

    small: int
    """Several microbatches on every rank."""
    whole: int
    """The whole batch in one microbatch."""


def layouts_that_fit(world: int, fits: Fits, *, full: bool = False) -> list[Layout]:
    """Every combination of tensor, sequence, pipeline, virtual pipeline, context and data parallelism of a world.

    DistributedOptimizer is on in every second layout with several data- or context-parallel ranks, and both on and off
    in the first of them.

    Args:
        world: number of ranks; what a layout does not use is data parallel.
        fits: asked for each combination.
        full: both optimizers in every layout that has two.
    """
    layouts: list[Layout] = []
    turn = 0
    for parallel in _combinations(world):
        try:
            fits(parallel)
        except ConfigurationError:
            continue
        if world == parallel.tensor * parallel.pipeline:
            layouts.append(Layout(parallel=parallel))
            continue
        both = full or turn == 0
        chosen = (False, True) if both else (turn % 2 == 1,)
        layouts += [Layout(parallel=parallel, distributed_optimizer=flag) for flag in chosen]
        turn += 1
    return layouts


def cases_of(index: int, losses: tuple[str, ...], budgets: Budgets, *, full: bool = False) -> list[Case]:
    """The steps under the layout of a number: two that alternate, so that four layouts have each loss, packed and
    padded, under each budget.

    Args:
        index: of the layout.
        losses: names.
        budgets: of a microbatch.
        full: every combination.
    """
    kinds: list[tuple[Literal["packed", "padded"], int]] = [
        ("packed", budgets.small),
        ("padded", budgets.whole),
        ("padded", budgets.small),
        ("packed", budgets.whole),
    ]
    every = list(itertools.product(losses, kinds))
    if full:
        chosen = every
    else:
        chosen = [(losses[(index // 2 + turn) % len(losses)], kinds[(2 * index + turn) % 4]) for turn in range(2)]
    return [
        Case(loss=loss, microbatch=MicrobatchConfig(layout=layout, max_tokens=budget))
        for loss, (layout, budget) in chosen
    ]


def _combinations(world: int) -> Iterator[ParallelConfig]:
    """All that divide the world, the least parallel first."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    triples = [t for t in itertools.product(sizes, repeat=3) if world % (t[0] * t[1] * t[2]) == 0]
    for tensor, pipeline, context in sorted(triples, key=lambda t: (t[0] * t[1] * t[2], t[1], t[2])):
        for sequence in (False, True) if tensor > 1 else (False,):
            for chunks in (None, 2) if pipeline > 1 else (None,):
                yield ParallelConfig(
                    tensor=tensor, pipeline=pipeline, context=context, sequence=sequence, virtual_pipeline=chunks
                )
