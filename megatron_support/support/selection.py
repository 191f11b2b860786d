"""From the gathered candidates to the support of every row: a threshold and the mass above it.

The support of a row is ``{x > threshold}`` and its tie group ``{x == threshold}``, or, under ``ties="index"``, the
first ``kept_ties`` of that group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

ALL_TIES = torch.iinfo(torch.int64).max

_MASS_UNITS = 2.0**40


@dataclass(frozen=True)
class Filters:
    """Top-k and top-p of every row; a filter that is off for all rows is None."""

    top_k: Tensor | None
    """int64 ``[A]``; the vocabulary's size or more, or 0: off for this row."""

    top_p: Tensor | None
    """float64 ``[A]``; 1 or more: off for this row."""

    vocabulary: int
    """Tokens in the vocabulary."""

    index_ties: bool
    """Whether a tie group at the boundary is trimmed, lowest index first."""

    candidates: int
    """How many of the largest logits to look for on each rank."""

    covers_top_k: bool = True
    """Whether that is known to be enough for every row's top-k, but for ties."""

    def k_active(self, like: Tensor) -> Tensor:
        if self.top_k is None:
            return torch.zeros(like.shape, dtype=torch.bool, device=like.device)
        return (self.top_k > 0) & (self.top_k < self.vocabulary)

    def p_active(self, like: Tensor) -> Tensor:
        if self.top_p is None:
            return torch.zeros(like.shape, dtype=torch.bool, device=like.device)
        return self.top_p < 1

    def at(self, entries: Tensor | slice) -> Filters:
        """The filters of some rows."""
        return replace(
            self,
            top_k=None if self.top_k is None else self.top_k[entries],
            top_p=None if self.top_p is None else self.top_p[entries],
        )


@dataclass(frozen=True)
class Boundary:
    """Where each row's values are cut, ``[A]``."""

    value: Tensor
    """The smallest kept scaled logit; -inf keeps all."""

    mass_above: Tensor
    """float64, mass of the logits strictly above ``value``."""

    ties: Tensor
    """float64, logits equal to ``value`` in the whole vocabulary; -1 where that is not known yet."""

    kept_ties: Tensor
    """float64, how many of them are kept."""

    def write(self, entries: Tensor, other: Boundary) -> None:
        """Replace some rows, in place."""
        for name in ("value", "mass_above", "ties", "kept_ties"):
            getattr(self, name)[entries] = getattr(other, name)

    def mass(self, maximum: Tensor) -> Tensor:
        """float64, mass of the kept logits."""
        tied = exp_difference(self.value, maximum)
        return self.mass_above + torch.where(self.kept_ties > 0, self.kept_ties * tied, 0.0)


def kept_by_mass(mass_above: Tensor, tied: Tensor, ties: Tensor, need: Tensor) -> Tensor:
    """How many of a boundary group's equal masses are kept in order: those with less than ``need`` before them."""
    return ((need - mass_above) / tied).ceil().clamp(min=1).minimum(ties)


@dataclass(frozen=True)
class Listing:
    """Logits of every row in descending order, with all of the row that are above ``bound``, once or several times."""

    values: Tensor
    """``[A, M]``, descending."""

    times: Tensor
    """float64 ``[A, M]``, how often each occurs; equal values may have a place each, or share one."""

    count: Tensor
    """float64 ``[A, M]``, logits down to and with this place."""

    mass: Tensor
    """float64 ``[A, M]``, their mass."""

    count_before: Tensor
    """float64 ``[A]``, logits above all places."""

    mass_before: Tensor
    """float64 ``[A]``, their mass."""

    bound: Tensor
    """``[A]``; -inf where the whole row is listed."""

    @classmethod
    def of(
        cls,
        values: Tensor,
        maximum: Tensor,
        bound: Tensor,
        times: Tensor | None = None,
        count_before: Tensor | None = None,
        mass_before: Tensor | None = None,
    ) -> Listing:
        """Of values in any order, or in descending order where each occurs once and none is above them."""
        mass = row_mass(values, maximum)
        if times is None:
            none = torch.zeros_like(mass[:, 0])
            times = torch.ones_like(mass)
            return cls(values, times, times.cumsum(1), mass.cumsum(1), none, none, bound)
        assert count_before is not None and mass_before is not None
        values, order = values.sort(-1, descending=True)
        times = times.gather(1, order)
        mass = mass.gather(1, order) * times
        count = times.cumsum(1) + count_before[:, None]
        return cls(values, times, count, mass.cumsum(1) + mass_before[:, None], count_before, mass_before, bound)

    def at(self, entries: slice) -> Listing:
        """Of some rows."""
        return Listing(*(getattr(self, field.name)[entries] for field in fields(self)))

    @property
    def places(self) -> int:
        return self.values.shape[1]

    def held(self) -> Tensor:
        """float64 ``[A]``, mass of the logits above the bound."""
        complete = (self.values > self.bound[:, None]).sum(1)
        mass = self.mass.gather(1, (complete - 1).clamp(min=0)[:, None]).squeeze(1)
        return torch.where(complete > 0, mass, self.mass_before)

    def group_at(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tie group of the place ``position [A]``: value, mass above, count above and size (float64)."""
        value = self.values.gather(1, position.clamp(max=self.places - 1)[:, None])
        above = (self.values > value).sum(1)
        ties = torch.where(self.values == value, self.times, 0.0).sum(1)
        last = (above - 1).clamp(min=0)[:, None]
        mass = torch.where(above > 0, self.mass.gather(1, last).squeeze(1), self.mass_before)
        count = torch.where(above > 0, self.count.gather(1, last).squeeze(1), self.count_before)
        return value.squeeze(1), mass, count, ties


def top_k_boundary(listing: Listing, normalizer: Tensor, filters: Filters) -> tuple[Boundary, Tensor]:
    """The boundary after top-k, all rows kept whole where it is off.

    Args:
        normalizer: float64 ``[A]``, mass of the whole row.

    Returns:
        The boundary, and bool ``[A]``: the k-th largest logit is not listed. Where it is and equals the bound, some of
        its ties may not be: ``ties`` is -1 there.
    """
    none = torch.zeros_like(normalizer)
    bound = listing.bound
    everything = Boundary(torch.full_like(bound, -torch.inf), normalizer, none, none)
    top_k = filters.top_k
    if top_k is None:
        return everything, torch.zeros_like(bound, dtype=torch.bool)
    active = filters.k_active(bound)
    first = (listing.count < top_k[:, None]).sum(1)
    value, above, count_above, ties = listing.group_at(first)
    kept = top_k - count_above if filters.index_ties else ties
    boundary = Boundary(value, above, torch.where(value > bound, ties, -1.0), kept.double())
    listed = (value >= bound) & (first < listing.places) & (listing.count_before < top_k)
    return where(active, boundary, everything), active & ~listed


def top_p_boundary(listing: Listing, maximum: Tensor, top_k: Boundary, filters: Filters) -> tuple[Boundary, Tensor]:
    """The boundary after top-p on what top-k left, and where it is not listed.

    A logit is kept iff the mass strictly above it is less than ``top_p`` times the mass that top-k left. That boundary
    is the first listed logit whose running sum reaches the need.

    Args:
        top_k: the boundary of the top-k stage, known for all rows.
    """
    assert filters.top_p is not None
    active = filters.p_active(maximum)
    bound = listing.bound
    need = filters.top_p * top_k.mass(maximum)
    first = (listing.mass < need[:, None]).sum(1)
    value, above, _, ties = listing.group_at(first)
    kept = kept_by_mass(above, exp_difference(value, maximum), ties, need) if filters.index_ties else ties
    within = Boundary(value, above, torch.where(value > bound, ties, -1.0), kept)
    inside, started = first < listing.places, listing.mass_before < need
    # rounding can leave the need unreached; the top-k boundary is then the last there is
    k_held = filters.k_active(maximum) & (top_k.value >= bound)
    at_k = k_held & ((value <= top_k.value) | ~inside)
    final = where(at_k, trim(top_k, need, maximum, filters), within)
    covered = started & (at_k | ((value > bound) & inside))
    return where(active, final, top_k), active & ~covered


def trim(boundary: Boundary, need: Tensor, maximum: Tensor, filters: Filters) -> Boundary:
    """The boundary with as many of its kept ties as top-p leaves; all of them when ties are kept as a group."""
    if not filters.index_ties:
        return boundary
    tied = exp_difference(boundary.value, maximum)
    return replace(boundary, kept_ties=kept_by_mass(boundary.mass_above, tied, boundary.kept_ties, need))


def exp_difference(value: Tensor, maximum: Tensor) -> Tensor:
    """float64 ``exp(value - maximum)``."""
    return (value.double() - maximum.double()).exp()


def row_mass(values: Tensor, maximum: Tensor) -> Tensor:
    """:func:`exp_difference` of ``values [A, M]`` and ``maximum [A]``, as numbers whose sums do not depend on order.

    For float32, multiples of 2^-40: the float64 sum of up to 8,192 of them, each at most 1, is exact.
    """
    mass = exp_difference(values, maximum[:, None])
    return mass if values.dtype == torch.float64 else mass.mul_(_MASS_UNITS).round_().div_(_MASS_UNITS)


def where(condition: Tensor, yes: Boundary, no: Boundary) -> Boundary:
    """Row by row the one or the other."""
    return Boundary(
        *(torch.where(condition, getattr(yes, n), getattr(no, n)) for n in ("value", "mass_above", "ties", "kept_ties"))
    )
