"""SIGTERM and SIGINT as a wish to stop after the present step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Remembers a signal for the length of a ``with`` block instead of ending the process.

    Further ones change nothing: a launcher passes on what the terminal has sent already. Outside of the main thread,
    and where it is not enabled, signals do what they did before.

    Args:
        enabled: whether to.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if self._enabled:
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def agreed(self, device: torch.device) -> str | None:
        """The signal that any rank has received, the same on every rank; collective where it is enabled.

        Args:
            device: one that torch.distributed's backend works on.
        """
        if not self._enabled:
            return None
        received = torch.tensor([self._received], device=device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        number = int(received.item())
        return signal.Signals(number).name if number else None
