"""Surrogates: pure functions from sanitised tokens to a loss per token."""

from megatron_support.loss.surrogates import clipped, weighted
from megatron_support.loss.surrogates.base import (
    SURROGATES,
    SurrogateInputs,
    SurrogateOutput,
    register_surrogate,
    surrogate_loss,
)

__all__ = [
    "SURROGATES",
    "SurrogateInputs",
    "SurrogateOutput",
    "clipped",
    "register_surrogate",
    "surrogate_loss",
    "weighted",
]
