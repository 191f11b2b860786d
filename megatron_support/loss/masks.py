"""Who takes part, decided once: exclusion, and selection before any arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_support.loss.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Exclusions:
    """Response tokens outside the support."""

    tokens: Tensor | None
    """bool per token; None where filtering is inactive."""
    candidates: Tensor | None
    """bool per token, valid tokens where filtering is active; None where it is inactive."""

    def by(self, logprobs: Tensor) -> Tensor | None:
        """bool per token: candidates that this source puts outside the support; None where filtering is inactive."""
        return None if self.candidates is None else self.candidates & (logprobs.detach() == -torch.inf)


def exclusions(valid: Tensor, filtered: Tensor | bool, *logprobs: Tensor | None) -> Exclusions:
    """Valid tokens with a log-probability of -inf where filtering is active.

    Formula: excluded where the sum of the sources is -inf. A NaN or +inf in another source makes that sum NaN: such a
    token has a fault and stays in.

    Args:
        valid: bool, response & sample mask.
        filtered: where filtering is active.
        logprobs: raw current, previous and generation log-probabilities of one shape; None for not given.
    """
    if filtered is False:
        return Exclusions(tokens=None, candidates=None)
    given = [values.detach() for values in logprobs if values is not None]
    total = given[0] + given[1] if len(given) > 1 else given[0]
    for values in given[2:]:
        total.add_(values)
    candidates = valid if filtered is True else valid & filtered
    # comparing into floats, then to bool, is several times faster on the CPU than comparing to bool
    outside = torch.eq(total, -torch.inf, out=total if len(given) > 1 else torch.empty_like(total)).to(torch.bool)
    return Exclusions(tokens=candidates & outside, candidates=candidates)


class Selection:
    """A mask that keeps values: ``selection(x)`` is x where the mask is True, 0 elsewhere, in at least fp32.

    Selecting comes before any arithmetic: a masked entry may be NaN or infinite, and 0 * inf is not 0. The same goes
    for the gradient, which is exactly 0 at a masked entry whatever arrives there.

    It is ``torch.where(mask, x, 0)`` by and-ing bits, which is several times faster on the CPU, and made once a mask.
    The compiler gets the plain form.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._bits: dict[torch.dtype, Tensor] = {}

    def bits(self, dtype: torch.dtype) -> Tensor:
        """The mask as integers of the dtype's width, all bits set where True."""
        word = torch.int64 if dtype == torch.float64 else torch.int32
        if word not in self._bits:
            self._bits[word] = self.mask.view(torch.uint8).to(word).neg_()
        return self._bits[word]

    def __call__(self, values: Tensor) -> Tensor:
        values = values if values.dtype == torch.float64 else values.float()
        if torch.compiler.is_compiling():
            return torch.where(self.mask, values, 0.0)
        bits = self.bits(values.dtype)
        if values.requires_grad and torch.is_grad_enabled():
            return _AndBits.apply(values, bits, None)
        return _keep(values, bits)

    def difference(self, values: Tensor, constant: Tensor) -> Tensor:
        """``selection(values - constant)`` with one tensor less; both of one dtype, no gradient for the constant."""
        constant = constant.detach()
        if torch.compiler.is_compiling():
            return self(values - constant)
        return _AndBits.apply(values, self.bits(values.dtype), constant)


def _keep(values: Tensor, bits: Tensor) -> Tensor:
    """``values`` where all bits are set, 0 where none is; without gradient."""
    return torch.bitwise_and(values.view(bits.dtype), bits).view(values.dtype)


class _AndBits(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: Tensor, constant: Tensor | None) -> Tensor:
        ctx.save_for_backward(bits)
        if constant is None:
            return _keep(values, bits)
        difference = values - constant
        difference.view(bits.dtype).bitwise_and_(bits)
        return difference

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gradient, (bits,) = grads[0].contiguous(), ctx.saved_tensors
        if gradient.requires_grad:
            return _AndBits.apply(gradient, bits, None), None, None
        return _keep(gradient, bits), None, None


def select(mask: Tensor, values: Tensor) -> Tensor:
    """``values`` where the mask is True, 0 elsewhere; see :class:`Selection`."""
    return Selection(mask)(values)


def on_cpu(values: Tensor) -> bool:
    """Whether looking at values costs no synchronisation; not while compiling, which knows none."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where True, 0 elsewhere. For values that are finite by construction, multiplying is the cheapest selection."""
    if torch.compiler.is_compiling():
        return mask.to(dtype)
    return mask.view(torch.uint8).to(dtype)  # several times faster on the CPU than converting bool


def intersection(mask: Tensor, other: Tensor) -> Tensor:
    """``mask & other`` of two bool masks that broadcast."""
    if torch.compiler.is_compiling():
        return mask & other
    # On bytes: the CPU is slow at broadcasting bool.
    return torch.bitwise_and(mask.view(torch.uint8), other.view(torch.uint8)).view(torch.bool)


def value_range(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest entry, NaN where an entry is NaN; detached. Zeros of no entries, as of masked ones."""
    values = values.detach()
    if values.numel() == 0:
        return values.new_zeros(()), values.new_zeros(())
    return torch.aminmax(values)


def poison(*ranges: tuple[Tensor, Tensor]) -> Tensor:
    """0 where every entry is finite, NaN otherwise, of tensors with these :func:`value_range`; no host synchronisation.

    Clipping would turn an infinite ratio into an ordinary number. Added to the loss, this keeps a fault visible.
    Sanitised tensors hold something non-finite only at tokens that take part.
    """
    return torch.stack([extreme for pair in ranges for extreme in pair]).mul(0).sum()


def count(mask: Tensor) -> Tensor:
    """int64 scalar: number of True entries."""
    return torch.count_nonzero(mask)


def sequence_counts(mask: Tensor, layout: Layout) -> Tensor:
    """float64 ``[sequences]``: this rank's True entries of each sequence (exact below 2^24 of one)."""
    return layout.local_sums(as_float(mask, torch.float32)).double()
