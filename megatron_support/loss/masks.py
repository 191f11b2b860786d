"""Who takes part: the KL mask, the actor mask, and why a token left. Everything after works on sanitised values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_support.loss.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Exclusions:
    """Response tokens outside the support, by source. A token may be in several sources. None: source not given."""

    tokens: Tensor | None
    """bool, in any source; None where filtering is inactive."""
    current: Tensor | None
    previous: Tensor | None
    generation: Tensor | None


def exclusions(
    valid: Tensor,
    filtered: Tensor | bool,
    *,
    current: Tensor,
    previous: Tensor | None,
    generation: Tensor | None,
) -> Exclusions:
    """Valid tokens with a log-probability of -inf where filtering is active.

    Args:
        valid: bool, response & sample mask.
        filtered: where filtering is active.
        current, previous, generation: raw log-probabilities of one shape. NaN and +inf exclude nothing.
    """
    if filtered is False:
        return Exclusions(tokens=None, current=None, previous=None, generation=None)
    candidates = valid if filtered is True else valid & filtered

    def outside(logprobs: Tensor | None) -> Tensor | None:
        return None if logprobs is None else candidates & (logprobs.detach() == -torch.inf)

    sources = [outside(current), outside(previous), outside(generation)]
    given = [source for source in sources if source is not None]
    excluded = given[0]
    for source in given[1:]:
        excluded = excluded | source
    return Exclusions(tokens=excluded, current=sources[0], previous=sources[1], generation=sources[2])


def select(mask: Tensor, values: Tensor) -> Tensor:
    """``values`` where the mask is True, 0 elsewhere, in at least fp32; so for the gradient.

    Selecting comes before any arithmetic: a masked entry may be NaN or infinite, and 0 * inf is not 0.
    """
    values = values if values.dtype == torch.float64 else values.float()
    return _Select.apply(values, mask)


class _Select(Function):
    """``torch.where(mask, values, 0)`` by and-ing bits, which is five times faster on the CPU, forward and backward."""

    @staticmethod
    def forward(values: Tensor, mask: Tensor) -> Tensor:
        word = torch.int32 if values.dtype == torch.float32 else torch.int64
        ones = mask.view(torch.uint8).to(word).neg()
        return torch.bitwise_and(values.view(word), ones).view(values.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.mask = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Select.apply(grads[0], ctx.mask), None


def as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where True, 0 elsewhere. For values that are finite by construction, multiplying is a cheaper selection."""
    return mask.view(torch.uint8).to(dtype)  # several times faster on the CPU than converting bool


def poison(*sanitised: Tensor | None) -> Tensor:
    """0 where every entry is finite, NaN otherwise; detached, no host synchronisation.

    Clipping would turn an infinite ratio into an ordinary number. Added to the loss, this keeps a fault visible.
    Sanitised tensors hold something non-finite only at tokens that take part.
    """
    probes = [(values.detach() * 0).sum() for values in sanitised if values is not None]
    assert probes, "at least one tensor"
    total = probes[0]
    for probe in probes[1:]:
        total = total + probe
    return total


def as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where True, 0 elsewhere. For values that are finite by construction, multiplying is a cheaper selection."""
    return mask.view(torch.uint8).to(dtype)  # several times faster on the CPU than converting bool


def count(mask: Tensor) -> Tensor:
    """int64 scalar: number of True entries."""
    return torch.count_nonzero(mask)


def sequence_counts(mask: Tensor, layout: Layout) -> Tensor:
    """float64 ``[sequences]``: this rank's True entries of each sequence."""
    if layout.sequence_ids is None:
        return torch.count_nonzero(mask, dim=-1).double()
    return layout.local_sums(mask.double())
