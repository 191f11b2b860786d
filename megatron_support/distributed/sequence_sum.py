"""The one differentiable collective of the loss: per-sequence sums over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


class _SumOverGroup(Function):
    """s = sum_r s_r on every rank. The total loss is sum_r L_r(s), so dL/ds_r = sum_r' dL_r'/ds: again a sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over_group(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of ``values`` over a group, on every rank; differentiable.

    Formula: ``s = sum_r values_r``; backward sums the ranks' gradients, so that adding up the gradients of all ranks'
    local losses gives the gradient of the loss of the whole sequence.

    Args:
        values: any shape, the same on every rank. Every rank of the group must take part in forward and in backward,
            also one that holds no token of a sequence (it passes zeros).
        group: a process group, or None for a single rank.
    """
    if group is None or group.size() == 1:
        return values
    return _SumOverGroup.apply(values, group)
