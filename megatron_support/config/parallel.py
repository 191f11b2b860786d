"""How a model is laid out over ranks, and which activations are computed again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from megatron_support.config.base import StrictModel
from megatron_support.config.bounds import PositiveInt

RecomputedModule = Literal["core_attn", "mlp", "moe", "shared_experts"]


class FullRecompute(StrictModel):
    """Keep only the input of whole layers and run them again in the backward pass."""

    type: Literal["full"]
    method: Literal["uniform", "block"] = "uniform"
    """uniform: all layers, in groups of ``num_layers``; block: the first ``num_layers`` of each model chunk, singly."""
    num_layers: PositiveInt = 1


class SelectiveRecompute(StrictModel):
    """Run parts of each layer again in the backward pass."""

    type: Literal["selective"]
    modules: Annotated[list[RecomputedModule], Field(min_length=1)]
    """``[core_attn]`` saves most for its cost."""


Recompute = Annotated[FullRecompute | SelectiveRecompute, Field(discriminator="type")]


class ParallelConfig(StrictModel):
    """Megatron's layout. The data-parallel size is what is left of the world."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: Annotated[int, Field(ge=2)] | None = None
    """Model chunks per pipeline rank (interleaved schedule)."""
    context: PositiveInt = 1
    expert: PositiveInt = 1
    """Ranks that share a layer's experts, each of them whole: tensor-, then context-, then data-parallel ranks."""
    sequence: bool = False
    """Megatron's sequence parallelism inside the tensor-parallel group."""
    recompute: Recompute | None = None
    """Activations to compute again in the backward pass instead of keeping them; null keeps all."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise ValueError(
                "virtual_pipeline must be null when pipeline is 1; set pipeline >= 2 or remove virtual_pipeline"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence must be false when tensor is 1; set tensor >= 2 or remove sequence")
        return self
