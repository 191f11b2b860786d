"""The actor loss: pure functions of tensors; see README.md beside this file."""

from megatron_support.loss.actor import actor_loss
from megatron_support.loss.faults import FaultCounts, TokenFault, describe_faults, fault_mask, find_faults
from megatron_support.loss.surrogates import SurrogateInputs, SurrogateOutput, register_surrogate

__all__ = [
    "FaultCounts",
    "SurrogateInputs",
    "SurrogateOutput",
    "TokenFault",
    "actor_loss",
    "describe_faults",
    "fault_mask",
    "find_faults",
    "register_surrogate",
]
