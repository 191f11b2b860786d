"""How long a rank is in collectives and transfers, from the timers that Megatron-Core calls around them."""

from __future__ import annotations

import time
from typing import Any

import torch

_WORDS = ("send", "recv", "grads-sync", "grads-all-reduce", "all-gather")
"""In the names of Megatron's timers around gradient reduction, pipeline transfers and parameter gathering."""


class CommunicationClock:
    """Stands where Megatron-Core expects its timers (``config.timers``), and keeps the time of communication.

    Gradient reduction, transfers between pipeline stages (with the wait for the other side) and the gathering of
    parameters are counted. Collectives inside a layer (tensor, sequence, context and expert parallelism) are part of
    its computation for Megatron, and are not. On an accelerator times are those of events in its stream.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watches: dict[str, _Watch | _Ignored] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Watch | _Ignored:
        """Megatron's way to a timer."""
        if name not in self._watches:
            counts = any(word in name for word in _WORDS)
            self._watches[name] = _Watch(self._device) if counts else _Ignored()
        return self._watches[name]

    def take(self) -> float:
        """Seconds since the last call."""
        return sum(watch.take() for watch in self._watches.values())


class _Watch:
    def __init__(self, device: torch.device) -> None:
        self._events = None if device.type == "cpu" else torch.get_device_module(device).Event
        self._begun: Any = None
        self._intervals: list[tuple[Any, Any]] = []

    def start(self, barrier: bool = False) -> None:
        self._begun = self._now()

    def stop(self, barrier: bool = False) -> None:
        self._intervals.append((self._begun, self._now()))

    def take(self) -> float:
        intervals, self._intervals = self._intervals, []
        if self._events is None:
            return sum(end - begin for begin, end in intervals)
        if intervals:
            intervals[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in intervals) / 1000

    def _now(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events(enable_timing=True)
        event.record()
        return event


class _Ignored:
    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...

    def take(self) -> float:
        return 0.0
