"""The optimizer and its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from megatron_support.config.base import StrictModel
from megatron_support.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class ScheduleConfig(StrictModel):
    """Learning rate over optimizer steps (Megatron's OptimizerParamScheduler)."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    """Null for the whole run."""


class OptimizerSettings(StrictModel):
    """Adam with Megatron's mixed precision."""

    lr: PositiveFloat
    min_lr: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm; 0 for no clipping."""
    distributed: bool = False
    """Shard optimizer state over data-parallel ranks (DistributedOptimizer)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass of the last microbatch still runs."""
    overlap_param_gather: bool = False
    """Gather the parameters of the next minibatch while its forward pass runs."""
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must be <= lr ({self.lr}), got {self.min_lr}; lower it")
        if self.overlap_param_gather and not (self.distributed and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather must be false without distributed and overlap_grad_reduce; set both to true, or "
                "remove it"
            )
        return self
