"""The machine that the tests of this folder run on, and its ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.ranks import run_ranks


@dataclass(frozen=True)
class Machine:
    kind: str
    """cuda or cpu."""
    ranks: int
    """As many as it can hold."""

    def run(self, world: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``body(rank, world, ...)`` on ranks of this machine. The body is a module's function: nothing is forked
        from a process that has used CUDA."""
        multiprocessing.set_forkserver_preload(["tests.gpu.bodies"])
        backend = "nccl" if self.kind == "cuda" else "gloo"
        return run_ranks(world, body, *args, backend=backend, start_method="forkserver", **kwargs)


@contextlib.contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """On CUDA, an error wherever the host waits for the device; on the CPU nothing can wait."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
