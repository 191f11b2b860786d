"""A layout's measurement beside that of one process."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_support.megatron.gradients import WholeGradients
from megatron_support.training.check_layouts.measure import Measurement

GRADIENT_TOLERANCE = 1e-5
"""Of a gradient's entries, relative to the largest of its tensor: fp32 sums in another order."""
LOGPROB_TOLERANCE = 2e-5
"""Of a log-probability, absolute where it is below 1, else relative."""
METRIC_TOLERANCE = 2e-5
"""Of the loss and every metric, relative."""
_METRIC_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    layout: str
    batch: str
    loss_name: str
    loss: float | None = None
    """None where the step failed."""
    gradient_difference: float | None = None
    logprob_difference: float | None = None
    support_differs: int | None = None
    """Response tokens inside the support of one and outside that of the other."""
    seconds: float = 0.0
    problems: tuple[str, ...] = ()
    """What differs beyond rounding, or the error."""

    @property
    def ok(self) -> bool:
        return not self.problems


def compare(row: Row, expected: Measurement, found: Measurement, response_mask: Tensor) -> Row:
    """Compare on rank 0.

    Args:
        row: names the step.
        expected: of one process.
        found: of the layout.
        response_mask: bool ``[N]``, without tokens at the boundary of their support.

    Returns:
        The row with what was found.
    """
    assert expected.gradients is not None and found.gradients is not None
    gradient, worst = _gradient_difference(expected.gradients, found.gradients)
    outside, other_outside = torch.isneginf(expected.logprobs), torch.isneginf(found.logprobs)
    differs = int(((outside != other_outside) & response_mask).sum())
    both = response_mask & ~outside & ~other_outside
    distance = (expected.logprobs[both] - found.logprobs[both]).abs() / expected.logprobs[both].abs().clamp_min(1.0)
    logprob = float(distance.max()) if both.any() else 0.0
    problems = []
    if not gradient <= GRADIENT_TOLERANCE:  # also where it is NaN
        problems.append(f"gradient of {worst}")
    if not logprob <= LOGPROB_TOLERANCE:
        problems.append("log-probabilities")
    if differs:
        problems.append(f"support of {differs} tokens")
    problems += [f"metric {name}" for name in _differing_metrics(expected.metrics, found.metrics)]
    return replace(
        row,
        loss=found.loss,
        gradient_difference=gradient,
        logprob_difference=logprob,
        support_differs=differs,
        seconds=found.seconds,
        problems=tuple(problems),
    )


def _gradient_difference(expected: WholeGradients, found: WholeGradients) -> tuple[float, str]:
    """The largest difference relative to its tensor's largest entry, and that tensor's name."""
    missing = set(expected.tensors) - set(found.tensors)
    if missing:
        return math.inf, min(missing)
    largest, worst = found.disagreement, "a rank's own copy"
    for name, tensor in found.tensors.items():
        whole = expected.counterpart(name)
        scale = float(whole.abs().max()) or 1.0
        difference = float((tensor - whole).abs().max()) / scale
        if not difference <= largest:
            largest, worst = difference, name
    return largest, worst


def _differing_metrics(expected: dict[str, float], found: dict[str, float]) -> list[str]:
    if expected.keys() != found.keys():
        return sorted(expected.keys() ^ found.keys())
    return [
        name
        for name, value in expected.items()
        if not math.isclose(value, found[name], rel_tol=METRIC_TOLERANCE, abs_tol=_METRIC_FLOOR)
    ]
