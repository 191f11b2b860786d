"""A large top-k in two small collectives: ranks exchange what surrounds the boundaries, not all candidates.

First every rank describes its k largest logits by every g-th of them and the mass down to it. From all descriptions
follows, per boundary, a limit that is not below it, and few logits lie between the two. Then every rank sends count and
mass above the limits, and the next distinct values below, with how often each occurs. Counts and masses are exact sums,
so that the boundary is that of the gathered candidates, bit for bit; where the values sent do not reach it, that shows,
and the row goes on to :mod:`refine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.support.selection import Filters, Listing, exp_difference, row_mass
from megatron_support.support.vocabulary import VocabularyShard

_LEVELS = 65535
_LOWEST_CODE = -32768
"""Fractions are sent as 16-bit integers from here on."""

_FEWEST_CANDIDATES = 144
"""Gathering fewer candidates than this takes less than the 0.6 KB a token of what is done here for a top-k of 1,000."""

_SPARE_PLACES = 5

_MOST_TIMES = 255
"""Of more logits that are equal on a rank, this many are sent and the value is taken for incomplete."""

_ROUNDING = 2.0**-14
"""Relative; how much the mass that top-p needs is lowered for the codes' rounding."""

_ELEMENTS = 1 << 17
"""Candidates worked on at a time, which bounds the memory for their float64 masses."""

_BEYOND = 1e30
"""Stands for the logits after the last described one."""


@dataclass(frozen=True)
class WindowPlan:
    """How ranks exchange their candidates around the boundaries."""

    described: int
    """How many of a rank's largest logits are described: the largest top-k."""

    spacing: int
    """Every so many of them are sent."""

    places: int
    """Distinct values below a limit that are sent."""

    mass: bool
    """Whether there is a top-p boundary."""

    @classmethod
    def of(cls, filters: Filters, held: int, shard: VocabularyShard, dtype: torch.dtype) -> WindowPlan | None:
        """The plan with the fewest bytes; None where all ``held`` candidates are gathered.

        Between a limit and its boundary lie up to ``spacing`` logits for each rank, of all ranks together. With two
        ranks, ``2 * spacing`` places would always do; a rank's share of them is seldom so large.
        """
        top_k = filters.top_k
        # sums of float64 masses depend on their order
        if shard.ranks == 1 or held <= _FEWEST_CANDIDATES or top_k is None or dtype == torch.float64:
            return None
        described = int(top_k.max())
        if described > held or not bool(filters.k_active(top_k).all()):
            return None
        share = (1 + shard.ranks) / 2
        spacing = max(2, round(math.sqrt(4 * described / (10 * share))))
        return cls(described, spacing, math.ceil(share * spacing) + _SPARE_PLACES, filters.top_p is not None)

    def positions(self, device: torch.device) -> Tensor:
        """int64 ``[n]``: places of the logits sent, among a rank's own in descending order."""
        later = torch.arange(self.spacing - 1, self.described, self.spacing, device=device)
        return torch.cat([later.new_zeros(1), later])


@dataclass(frozen=True)
class Windows:
    """What all ranks sent."""

    last: Tensor
    """``[A]``: the largest of the ranks' last candidates, where these are not all that it has; else -inf."""

    k: Listing
    """Around the boundary of top-k."""

    p: Listing
    """Around the boundary of top-p; that of top-k where there is none."""

    def at(self, entries: slice) -> Windows:
        """Of some rows."""
        return Windows(self.last[entries], self.k.at(entries), self.p.at(entries))


def _in_parts(function: Callable[..., list[Tensor]], *tensors: Tensor) -> list[Tensor]:
    """``function(*tensors)``, a few rows at a time."""
    step = max(1, _ELEMENTS // tensors[0].shape[1])
    parts = [function(*part) for part in zip(*(tensor.split(step) for tensor in tensors), strict=True)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def describe(values: Tensor, plan: WindowPlan) -> list[Tensor]:
    """This rank's part of the first collective, ``[A, n]`` each: ends of the scale, and the logits and masses.

    Args:
        values: ``[A, K]``, the rank's candidates, descending.
    """
    return _in_parts(lambda values: _describe(values, plan), values)


def _describe(values: Tensor, plan: WindowPlan) -> list[Tensor]:
    sent = values[:, plan.positions(values.device)]
    first, lowest = sent[:, :1], sent.masked_fill(sent == -torch.inf, torch.inf).amin(1, keepdim=True)
    span = (first.double() - lowest.double()).clamp(min=torch.finfo(torch.float64).tiny)
    # rounded up, by a bit more than float64's own rounding: a limit has its equals below it
    code = ((first.double() - sent.double()) / span * (_LEVELS - 1) - 1e-6).floor_().clamp_(0, _LEVELS)
    code.masked_fill_(sent == -torch.inf, _LEVELS)
    parts = [first, lowest, _as_code(code[:, 1:])]
    if plan.mass:
        mass = exp_difference(values, first)
        running = mass.nan_to_num_(0.0)[:, : plan.described].cumsum(1)
        total = running[:, -1:].float()
        fraction = running[:, plan.positions(values.device)[1:]] / total
        parts += [total, _as_code((fraction * _LEVELS).ceil_().clamp_(0, _LEVELS))]
    return parts


def _as_code(levels: Tensor) -> Tensor:
    # NaN: a row with a NaN or without a finite logit on this rank; its window does not matter, its outputs are NaN or
    # come from the other ranks
    return (levels.nan_to_num(0.0).int() + _LOWEST_CODE).to(torch.int16)


def _as_level(code: Tensor) -> Tensor:
    return code.double() - _LOWEST_CODE


def limits(received: list[Tensor], maximum: Tensor, plan: WindowPlan, filters: Filters) -> list[Tensor]:
    """``[A]`` per boundary: values that are not below it, from all ranks' descriptions ``[ranks, A, n]``.

    A described logit that is the n-th of its rank has fewer than n of its rank above it, and one that lies between two
    described ones of another rank fewer than the lower of these has. So merging the descriptions in descending order
    gives, for each described logit, an upper limit of the count above it, and likewise of the mass.
    """
    assert filters.top_k is not None
    first, lowest, code = received[:3]
    span = first.double() - lowest.double()
    level = _as_level(code)
    value = (first.double() - level / (_LEVELS - 1) * span).masked_fill(level == _LEVELS, -torch.inf)
    value = torch.cat([first.double(), value], 2)
    steps = torch.full_like(value, plan.spacing)
    steps[..., 0] = plan.spacing - 1
    steps[..., -1] = _BEYOND
    value, order = _merged(value).sort(-1, descending=True)
    count = _above(_merged(steps).gather(1, order))
    k = filters.top_k[:, None].double()
    at_k = (count < k).sum(1, keepdim=True) - 1
    found = [value.gather(1, at_k.clamp(min=0))]
    if plan.mass:
        assert filters.top_p is not None
        total, code = received[3:]
        running = _as_level(code) / _LEVELS * total * exp_difference(first, maximum[:, None]).nan_to_num(0.0)
        steps = torch.diff(running, prepend=torch.zeros_like(total), append=running[..., -1:] + _BEYOND)
        mass = _above(_merged(steps).gather(1, order))
        # at least so much is left by top-k: of the logits counted above its limit, and of as many more as are missing
        below = value.gather(1, (at_k + 2 * first.shape[0]).clamp(max=value.shape[1] - 1))
        missing = k - count.gather(1, at_k.clamp(min=0))
        left = mass.gather(1, at_k.clamp(min=0)) + missing * exp_difference(below, maximum[:, None]).nan_to_num(0.0)
        need = filters.top_p[:, None] * left * (1 - _ROUNDING)
        at_p = torch.minimum((mass < need).sum(1, keepdim=True) - 1, at_k)
        found.append(value.gather(1, at_p.clamp(min=0)))
    return [limit.squeeze(1).to(maximum.dtype) for limit in found]


def _merged(parts: Tensor) -> Tensor:
    """``[ranks, A, n]`` as ``[A, ranks * n]``."""
    return parts.transpose(0, 1).flatten(1)


def _above(steps: Tensor) -> Tensor:
    """Running sums without the place's own."""
    running = steps.cumsum(1)
    return torch.cat([torch.zeros_like(running[:, :1]), running[:, :-1]], 1)


def window(values: Tensor, limit: Tensor, maximum: Tensor, plan: WindowPlan, *, all_held: bool) -> list[Tensor]:
    """This rank's part of the second collective, for one boundary, ``[A, n]`` each.

    Args:
        values: ``[A, K]``, the rank's candidates, descending.
        all_held: whether these are all logits of the rank.

    Returns:
        Count and mass above the limit, the bound above which nothing is missing, distinct values and their times.
    """

    def part(values: Tensor, limit: Tensor, maximum: Tensor) -> list[Tensor]:
        return _window(values, limit, maximum, plan.places, all_held)

    return _in_parts(part, values, limit, maximum)


def _window(values: Tensor, limit: Tensor, maximum: Tensor, places: int, all_held: bool) -> list[Tensor]:
    above = values > limit[:, None]
    count = above.sum(1, keepdim=True)
    mass = torch.where(above, row_mass(values, maximum), 0.0).sum(1, keepdim=True)
    group = torch.cat([torch.zeros_like(count), (values[:, 1:] < values[:, :-1]).cumsum(1)], 1)
    place = group - group.gather(1, count.clamp(max=values.shape[1] - 1))
    outside = above | (place >= places)
    place = place.masked_fill(outside, places)
    distinct = torch.full((values.shape[0], places + 1), -torch.inf, dtype=values.dtype, device=values.device)
    distinct = distinct.scatter_(1, place, values)[:, :-1]
    times = torch.zeros(distinct.shape[0], places + 1, dtype=torch.int64, device=values.device)
    times = times.scatter_add_(1, place, torch.ones_like(place))[:, :-1]
    bound = values.masked_fill(~(outside & ~above), -torch.inf).amax(1, keepdim=True)
    bound = torch.maximum(bound, distinct.masked_fill(times <= _MOST_TIMES, -torch.inf).amax(1, keepdim=True))
    if not all_held:
        bound = torch.maximum(bound, values[:, -1:])
    return [count.to(torch.int16), mass, bound, distinct.contiguous(), times.clamp(max=_MOST_TIMES).to(torch.uint8)]


def listing(received: list[Tensor], maximum: Tensor) -> Listing:
    """All ranks' windows ``[ranks, A, n]`` of one boundary as one listing."""
    count, mass, bound, distinct, times = received
    return Listing.of(
        _merged(distinct),
        maximum,
        bound.amax(0).squeeze(1),
        _merged(times).double(),
        count.double().sum(0).squeeze(1),
        mass.sum(0).squeeze(1),
    )
