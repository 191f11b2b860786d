"""The K largest logits of every row without sorting it.

A row is cut into strided groups. The K largest elements can all be taken inside the K groups with the largest maxima,
so two small top-K selections replace one over the vocabulary; the groups' maxima are made anyway, for the row's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GROUP_SIZES = (1, 2, 4, 8, 16)
_GATHER_COST = 1.2
"""Time of one gathered and searched logit, in group maxima searched."""


@dataclass(frozen=True)
class CandidatePlan:
    """How the ``count`` largest of a row are found: groups of ``group`` columns with equal stride, then a tail."""

    count: int
    group: int
    columns: int

    @classmethod
    def of(cls, count: int, columns: int) -> CandidatePlan:
        """The cheapest plan for that many candidates; the whole row where it is no longer than that."""
        count = min(count, columns)

        def cost(group: int) -> float:
            return columns if group == 1 else columns / group + _GATHER_COST * group * count

        return cls(count, min((g for g in _GROUP_SIZES if columns // g >= max(count, 1)), key=cost, default=1), columns)

    @property
    def groups(self) -> int:
        return self.columns // self.group

    def group_maxima(self, x: Tensor) -> Tensor:
        """Maxima ``[c, groups (+ tail columns)]`` of ``x [c, W]``: their maximum is the row's."""
        if self.columns == 0:
            return x.new_full((x.shape[0], 1), -torch.inf)
        if self.group == 1:
            return x
        grouped = self.groups * self.group
        maxima = x[:, :grouped].unflatten(1, (self.group, self.groups)).amax(1)
        return maxima if grouped == self.columns else torch.cat([maxima, x[:, grouped:]], 1)


@dataclass(frozen=True)
class Candidates:
    """The largest scaled logits of this rank, per row in descending order."""

    values: Tensor
    """``[A, K]``"""

    columns: Tensor | None
    """int64 ``[A, K]``, the column of each; None unless asked for."""

    @classmethod
    def empty(cls, rows: int, count: int, dtype: torch.dtype, device: torch.device, *, ids: bool) -> Candidates:
        """Room for that many; -inf stands for "no such logit", on a rank with fewer columns."""
        return cls(
            torch.full((rows, count), -torch.inf, dtype=dtype, device=device),
            torch.zeros(rows, count, dtype=torch.int64, device=device) if ids else None,
        )


def largest(x: Tensor, maxima: Tensor, plan: CandidatePlan, out: Candidates, at: slice) -> None:
    """Write the plan's candidates of ``x [c, W]`` to rows ``at`` of ``out``.

    Args:
        maxima: ``plan.group_maxima(x)``.
    """
    if plan.group == 1:
        values, position = x.topk(plan.count, -1)
        out.values[at, : plan.count] = values
        columns = position
    else:
        groups = maxima[:, : plan.groups].topk(plan.count, -1, sorted=False).indices
        grouped = plan.groups * plan.group
        members = groups[:, None, :].expand(-1, plan.group, -1)
        pool = x[:, :grouped].unflatten(1, (plan.group, plan.groups)).gather(2, members).flatten(1)
        if grouped < plan.columns:
            pool = torch.cat([pool, x[:, grouped:]], 1)
        values, position = pool.topk(plan.count, -1)
        out.values[at, : plan.count] = values
        columns = _columns(position, groups, plan) if out.columns is not None else position
    if out.columns is not None:
        out.columns[at, : plan.count] = columns


def _columns(position: Tensor, groups: Tensor, plan: CandidatePlan) -> Tensor:
    """Columns of the logits for positions ``[c, K]`` in the pool (members of the chosen groups, then the tail)."""
    member = position // plan.count
    column = member * plan.groups + groups.gather(1, position % plan.count)
    tail = plan.groups * plan.group + position - plan.group * plan.count
    return torch.where(member < plan.group, column, tail)
