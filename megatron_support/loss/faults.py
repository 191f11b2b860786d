"""Where a number that must be finite is not. Counting never synchronises; describing reads values on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_support.config.loss import ActorLossConfig
from megatron_support.loss.inputs import TokenInputs, token_inputs
from megatron_support.loss.masks import count, exclusions

MAX_GENERATION_LOGPROB = 1e-4
"""A log-probability is at most 0; an engine's rounding may leave it a little above."""


@dataclass(frozen=True, kw_only=True)
class FaultCounts:
    """int64 scalars on the device, detached: faults by tensor name, and in all."""

    by_name: dict[str, Tensor]
    total: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenFault:
    """One number that breaks its rule."""

    name: str
    """Which tensor, e.g. ``generation_logprobs``."""
    position: int
    """Flat index of the token in the tensors that were passed."""
    sequence: int
    """Index of its sequence: the row, or the sequence id."""
    value: float
    rule: str
    """What the number must be."""

    def __str__(self) -> str:
        return f"{self.name} at token {self.position} of sequence {self.sequence} is {self.value}, {self.rule}"


def find_faults(config: ActorLossConfig, **tensors: Any) -> FaultCounts:
    """Count the numbers that the loss reads, must be finite and are not.

    NaN and +inf always; -inf where filtering is inactive (current, previous and generation log-probabilities), at KL
    tokens (reference and unfiltered), or anywhere (advantages, entropy, correction weights); a generation
    log-probability above 0. A missing entry is NaN. Masked positions may hold anything.

    Args:
        config: what the loss reads.
        tensors: as for :func:`actor_loss`; what has no bearing on faults is ignored.

    Raises:
        ConfigurationError: a tensor has the wrong shape.
    """
    counts = {name: count(mask) for name, (mask, _, _) in _faults(config, _inputs(config, tensors)).items()}
    total = torch.stack(list(counts.values())).sum()
    return FaultCounts(by_name=counts, total=total)


def fault_mask(config: ActorLossConfig, **tensors: Any) -> Tensor:
    """bool, of the tokens' shape: where any tensor has a fault. Arguments and errors as for :func:`find_faults`."""
    masks = [mask for mask, _, _ in _faults(config, _inputs(config, tensors)).values()]
    return torch.stack(masks).any(dim=0)


def describe_faults(config: ActorLossConfig, *, limit: int = 5, **tensors: Any) -> list[TokenFault]:
    """The first ``limit`` faults of each tensor. Reads values, so it synchronises; for messages."""
    inputs = _inputs(config, tensors)
    described = []
    for name, (mask, values, rule) in _faults(config, inputs).items():
        ids = inputs.layout.sequence_ids
        for position in mask.reshape(-1).nonzero().reshape(-1)[:limit].tolist():
            sequence = position // mask.shape[-1] if ids is None else int(ids[position])
            value = float(values.reshape(-1)[position])
            described.append(TokenFault(name=name, position=position, sequence=sequence, value=value, rule=rule))
    return described


def _inputs(config: ActorLossConfig, tensors: dict[str, Any]) -> TokenInputs:
    read: dict[str, Any] = {name: tensors.get(name) for name in _READ if tensors.get(name) is not None}
    if config.surrogate.type == "on_policy":
        read.pop("prev_logprobs", None)
    if not config.needs_reference:
        read.pop("reference_logprobs", None)
        read.pop("curr_logprobs_unfiltered", None)
    if config.entropy_coef == 0:
        read.pop("entropy", None)
    return token_inputs(**read)


_READ = (
    "curr_logprobs",
    "response_mask",
    "advantages",
    "sample_mask",
    "sequence_ids",
    "filtered",
    "rewards",
    "prev_logprobs",
    "generation_logprobs",
    "reference_logprobs",
    "curr_logprobs_unfiltered",
    "entropy",
    "correction_weights",
)


def _faults(config: ActorLossConfig, inputs: TokenInputs) -> dict[str, tuple[Tensor, Tensor, str]]:
    """By name: (bool mask of faults, values, rule)."""
    excluded = exclusions(
        inputs.valid, inputs.filtered, inputs.curr_logprobs, inputs.prev_logprobs, inputs.generation_logprobs
    )
    survives = inputs.valid if excluded.tokens is None else inputs.valid & ~excluded.tokens
    filtered_rule = "it must be finite, or -inf for a token outside the support of an active sampling filter"
    found: dict[str, tuple[Tensor, Tensor, str]] = {}

    def add(name: str, faulty: Tensor, values: Tensor, rule: str) -> None:
        found[name] = (faulty, values.detach(), rule)

    for name in ("curr_logprobs", "prev_logprobs", "generation_logprobs"):
        values = getattr(inputs, name)
        if values is None:
            continue
        wrong = inputs.valid & ~torch.isfinite(values.detach())
        outside = excluded.by(values)
        if outside is not None:
            wrong = wrong & ~outside
        rule = filtered_rule
        if name == "generation_logprobs":
            wrong = wrong | (inputs.valid & (values > MAX_GENERATION_LOGPROB))
            rule = "it must be finite and <= 0, or -inf for a token outside the support of an active sampling filter"
        add(name, wrong, values, rule)
    for name, mask in (
        ("reference_logprobs", inputs.valid),
        ("curr_logprobs_unfiltered", inputs.valid),
        ("entropy", survives),
        ("advantages", survives),
        ("correction_weights", survives),
    ):
        values = getattr(inputs, name)
        if values is not None:
            add(name, mask & ~torch.isfinite(values.detach()), values, "it must be finite")
    return found
