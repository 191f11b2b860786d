"""From the gathered candidates to the support of every row: a threshold and the mass above it.

The support of a row is ``{x > threshold}`` and its tie group ``{x == threshold}``, or, under ``ties="index"``, the
first ``kept_ties`` of that group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ALL_TIES = torch.iinfo(torch.int64).max


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


def top_k_boundary(
    candidates: Tensor, cumulative: Tensor, bound: Tensor, normalizer: Tensor, filters: Filters
) -> tuple[Boundary, Tensor]:
    """The boundary after top-k, all rows kept whole where it is off.

    Args:
        candidates: ``[A, M]``, descending, with every logit of the row that is above ``bound``.
        cumulative: float64 ``[A, M]``, running sum of their masses.
        bound: ``[A]``, the largest of the ranks' smallest candidates; -inf where the candidates are the whole row.
        normalizer: float64 ``[A]``, mass of the whole row.

    Returns:
        The boundary, and bool ``[A]``: the k-th largest logit is not among the candidates. Where it is and equals the
        bound, some of its ties may not be: ``ties`` is -1 there.
    """
    none = torch.zeros_like(normalizer)
    everything = Boundary(torch.full_like(bound, -torch.inf), normalizer, none, none)
    top_k = filters.top_k
    if top_k is None:
        return everything, torch.zeros_like(bound, dtype=torch.bool)
    active = filters.k_active(bound)
    value, above, count_above, ties = _group_at(candidates, cumulative, (top_k - 1).clamp(min=0))
    kept = top_k - count_above if filters.index_ties else ties
    boundary = Boundary(value, above, torch.where(value > bound, ties, -1.0), kept.double())
    unknown = active & ((value < bound) | (top_k > candidates.shape[1]))
    return where(active, boundary, everything), unknown


def top_p_boundary(
    candidates: Tensor, cumulative: Tensor, bound: Tensor, maximum: Tensor, top_k: Boundary, filters: Filters
) -> tuple[Boundary, Tensor]:
    """The boundary after top-p on what top-k left, and where it is not among the candidates.

    A logit is kept iff the mass strictly above it is less than ``top_p`` times the mass that top-k left. That boundary
    is the first candidate whose running sum reaches the need.

    Args:
        top_k: the boundary of the top-k stage, known for all rows.
    """
    assert filters.top_p is not None
    active = filters.p_active(maximum)
    need = filters.top_p * top_k.mass(maximum)
    first = (cumulative < need[:, None]).sum(1)
    value, above, _, ties = _group_at(candidates, cumulative, first)
    kept = kept_by_mass(above, exp_difference(value, maximum), ties, need) if filters.index_ties else ties
    within = Boundary(value, above, torch.where(value > bound, ties, -1.0), kept)
    inside = first < candidates.shape[1]
    # rounding can leave the need unreached; the top-k boundary is then the last there is
    k_held = filters.k_active(maximum) & (top_k.value >= bound)
    at_k = k_held & ((value <= top_k.value) | ~inside)
    final = where(at_k, trim(top_k, need, maximum, filters), within)
    covered = at_k | ((value > bound) & inside)
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


def _group_at(candidates: Tensor, cumulative: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tie group of the candidate at ``position [A]``: value, mass above, count above and size (float64)."""
    value = candidates.gather(1, position.clamp(max=candidates.shape[1] - 1)[:, None])
    count_above = (candidates > value).sum(1)
    ties = (candidates == value).sum(1).double()
    before = cumulative.gather(1, (count_above - 1).clamp(min=0)[:, None]).squeeze(1)
    return value.squeeze(1), torch.where(count_above > 0, before, 0.0), count_above.double(), ties


def where(condition: Tensor, yes: Boundary, no: Boundary) -> Boundary:
    """Row by row the one or the other."""
    return Boundary(
        *(torch.where(condition, getattr(yes, n), getattr(no, n)) for n in ("value", "mass_above", "ties", "kept_ties"))
    )
