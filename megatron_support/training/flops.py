"""Floating-point operations of a step, and what the hardware could do: model FLOPs utilisation."""

from __future__ import annotations

import re

from megatron_support.config.recipe import ActorStepConfig, Architecture, ModelConfig
from megatron_support.rollouts.batch import RolloutBatch

# Dense bf16 peaks in TFLOP/s, from the vendor's data sheets; the more special name first.
_PEAKS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("A40", 150.0),
    ("A10", 125.0),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
)


def peak_flops(device_name: str, model: ModelConfig, given_tflops: float | None) -> float | None:
    """FLOP/s of one device; None where it is not known.

    Args:
        device_name: as the driver says it.
        model: known peaks are those of bfloat16.
        given_tflops: the recipe's ``logging.peak_tflops``, which wins.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    if model.dtype != "bfloat16":
        return None
    return next((peak * 1e12 for name, peak in _PEAKS if re.search(rf"\b{name}\b", device_name)), None)


def forward_flops(architecture: Architecture, rollouts: RolloutBatch, *, response_only: bool = True) -> float:
    """Of one forward pass over all tokens.

    Formula: ``2 N_layers T + 2 h V T_head + 2 L a d sum_s l_s^2``: two operations for each weight and token, the output
    layer where log-probabilities are wanted, and the two products of causal attention (half of the l x l square each).

    Args:
        architecture: the dense model.
        rollouts: of the step.
        response_only: whether the output layer runs on response tokens alone.
    """
    hidden = architecture.hidden_size
    head_dim = architecture.head_dim or hidden // architecture.num_attention_heads
    queries = architecture.num_attention_heads * head_dim
    groups = (architecture.num_query_groups or architecture.num_attention_heads) * head_dim
    layer = hidden * (2 * queries + 2 * groups + 3 * architecture.ffn_hidden_size)
    tokens = rollouts.tokens.numel()
    head_tokens = int(rollouts.response_mask.sum()) if response_only else tokens
    squares = float(rollouts.lengths.double().square().sum())
    products = 2 * architecture.num_layers * queries * squares
    return 2.0 * (architecture.num_layers * layer * tokens + hidden * architecture.vocab_size * head_tokens) + products


def step_flops(architecture: Architecture, rollouts: RolloutBatch, step: ActorStepConfig, *, teacher: bool) -> float:
    """Of an actor step: forward-only passes, and three times a forward pass for each epoch's update.

    Recomputed activations are not counted: this is what the model needs, not what the machine does.
    """
    passes = int(step.needs_previous) + int(step.needs_reference) + int(teacher) + 3 * step.epochs
    return passes * forward_flops(architecture, rollouts, response_only=step.logprobs.response_only)
