"""What ``megatron-support replay`` computes over a rollout file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_support.config.advantages import Advantages
from megatron_support.config.base import StrictModel
from megatron_support.config.loss import ActorLossConfig


class ReplayConfig(StrictModel):
    """A loss over a file."""

    loss: ActorLossConfig = ActorLossConfig()
    advantages: Advantages | None = None
    """Null: those of the file."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Parts, each normalised by itself, as those of a step's optimizer steps were."""
