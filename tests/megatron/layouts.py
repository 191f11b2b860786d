"""The layouts that are compared with one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

MOST_RANKS = 8

RECOMPUTE: tuple[dict[str, Any] | None, ...] = (
    None,
    {"type": "full"},
    {"type": "full", "method": "block"},
    {"type": "selective", "modules": ["core_attn"]},
    {"type": "selective", "modules": ["mlp"]},
)
OPTIMIZER: tuple[dict[str, bool], ...] = (
    {},
    {"distributed": True},
    {"overlap_grad_reduce": True},
    {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
)
BUDGET = (64, 128, 1024)
"""Tokens of a microbatch: from one with few sequences to one for everything."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run an actor step."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    data: int = 1
    recompute: int = 0
    """Index into RECOMPUTE."""
    optimizer: int = 0
    """Index into OPTIMIZER."""
    budget: int = BUDGET[0]
    fused_head: bool = False
    per_token: bool = False
    """Megatron's ``calculate_per_token_loss``."""

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def name(self) -> str:
        parts = [
            f"tp{self.tensor}{'sp' if self.sequence else ''}",
            f"pp{self.pipeline}{f'v{self.virtual_pipeline}' if self.virtual_pipeline else ''}",
            f"cp{self.context}",
            f"dp{self.data}",
        ]
        recompute, optimizer = RECOMPUTE[self.recompute], OPTIMIZER[self.optimizer]
        if recompute:
            parts.append("-".join([recompute["type"], recompute.get("method", ""), *recompute.get("modules", ())]))
        parts += [name.replace("_", "") for name in optimizer]
        parts += [
            f"budget{self.budget}",
            *(["fused"] if self.fused_head else []),
            *(["flag"] if self.per_token else []),
        ]
        return "_".join(part.replace("--", "-").rstrip("-") for part in parts)

    @property
    def setup(self) -> dict[str, Any]:
        """Arguments of ``make_step``, but for the budget, which goes with padded or packed."""
        return {
            "parallel": {
                "tensor": self.tensor,
                "sequence": self.sequence,
                "pipeline": self.pipeline,
                "virtual_pipeline": self.virtual_pipeline,
                "context": self.context,
                "recompute": RECOMPUTE[self.recompute],
            },
            "optimizer": OPTIMIZER[self.optimizer],
            "per_token": self.per_token,
        }


def _shapes() -> Iterator[dict[str, Any]]:
    tensors = ((1, False), (2, False), (2, True))
    pipelines = ((1, None), (2, None), (2, 2), (4, None))
    for (tensor, sequence), (pipeline, chunks), context, data in itertools.product(
        tensors, pipelines, (1, 2), (1, 2, 3, 4)
    ):
        if tensor * pipeline * context * data <= MOST_RANKS:
            yield {
                "tensor": tensor,
                "sequence": sequence,
                "pipeline": pipeline,
                "virtual_pipeline": chunks,
                "context": context,
                "data": data,
            }


@cache
def all_layouts() -> tuple[Layout, ...]:
    """Every shape of up to eight ranks, the other settings dealt over them so that they meet in many combinations."""
    return tuple(
        Layout(
            **shape,
            recompute=index % len(RECOMPUTE),
            optimizer=(index + index // 4) % len(OPTIMIZER),
            budget=BUDGET[(index + index // 5) % len(BUDGET)],
            fused_head=(index + index // 3) % 2 == 1,
            per_token=(index // 2 + index // 3) % 2 == 1,
        )
        for index, shape in enumerate(_shapes())
    )


@cache
def small_layouts() -> tuple[Layout, ...]:
    """Those of up to four ranks: what runs unless ``--full`` asks for all."""
    return tuple(layout for layout in all_layouts() if layout.world <= 4)
