"""An error that one rank finds is raised by all, so that no rank waits for another that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_support.errors import (
    CheckpointError,
    ConfigurationError,
    Fault,
    GradientFault,
    LogprobFault,
    RolloutError,
)

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ConfigurationError,
        GradientFault,
        LogprobFault,
        Fault,
        RolloutError,
        CheckpointError,
        ValueError,
        RuntimeError,
    )
}
"""A type comes before those it derives from."""


Result = TypeVar("Result")


def decide_together(function: Callable[[], Result], *, device: torch.device | None = None) -> Result:
    """What each rank's function returns, or one error on all of them if it failed on any. Collective.

    For what may differ between machines, such as reading a file: the function itself must enter no collective.

    Args:
        function: called once on every rank.
        device: one that the backend works on; None for the CPU.

    Raises:
        Exception: as :func:`raise_together`.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as found:  # noqa: BLE001 - the others must not wait for this rank
        error = found
    raise_together(error, dist.group.WORLD, device)
    return cast("Result", result)


def raise_together(error: Exception | None, group: ProcessGroup | None, device: torch.device | None = None) -> None:
    """Raise on every rank of a group if any rank has an error; collective.

    Costs one small reduction where nobody has an error.

    Args:
        error: this rank's, or None.
        group: None for a single rank.
        device: one that the group's backend works on; None for the CPU.

    Raises:
        Exception: of the type and message of the lowest rank that has one (of its nearest known type for an exception
            from elsewhere), with the count of further ranks that have one.
    """
    if group is None:
        if error is not None:
            raise error
        return
    failed = torch.tensor([int(error is not None)], device=device)
    dist.all_reduce(failed, group=group)
    if not failed.item():
        return
    gathered: list[tuple[str, str] | None] = [None] * group.size()
    dist.all_gather_object(
        gathered, None if error is None else (kind_of(error) or "RuntimeError", str(error)), group=group
    )
    reports = [report for report in gathered if report is not None]
    kind, message = reports[0]
    others = len({report for report in reports if report != reports[0]})
    suffix = f"\n(and {others} more on other ranks)" if others else ""
    raise error_like(kind, message + suffix) from error


def kind_of(error: Exception) -> str | None:
    """Name of the nearest type that other ranks can raise too; None for an exception from elsewhere."""
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), None)


def error_like(kind: str, message: str) -> Exception:
    """An exception of a kind that :func:`kind_of` has named."""
    return _KINDS[kind](message)
