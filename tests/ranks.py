"""Run a function on N ranks (forked, with gloo, unless asked otherwise) and return what each rank returned.

Forking from a parent that has already imported torch and megatron makes a two-rank test take half a second instead of
the twelve that cold interpreters need. Rendezvous is a file, so nothing listens on a fixed port.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RanksFailed(AssertionError):
    """At least one rank raised or did not end in time; carries every rank's traceback."""


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 240.0,
    backend: str = "gloo",
    start_method: str = "fork",
    **kwargs: Any,
) -> list[Any]:
    """``[fn(rank, world, *args, **kwargs) for rank in range(world)]``, each in its own process.

    Args:
        fn: any callable (closures too, where forked); its result must pickle.
        timeout: seconds after which the ranks are ended and the test fails.
        backend: of torch.distributed. With NCCL a rank has the GPU of its number.
        start_method: of multiprocessing. A process that has used CUDA cannot be forked.

    Raises:
        RanksFailed: naming each failed rank, with its traceback.
    """
    context = mp.get_context(start_method)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = [
            context.Process(target=_entry, args=(rank, world, folder, backend, fn, args, kwargs))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        _join(processes, time.monotonic() + timeout)
        errors = [p.read_text() for p in sorted(Path(folder).glob("error-*"))]
        silent = [r for r in range(world) if not (Path(folder) / f"result-{r}").exists()]
        if errors or silent:
            codes = [process.exitcode for process in processes]
            raise RanksFailed("\n".join([f"ranks without a result: {silent}, exit codes {codes}", *errors]))
        return [pickle.loads((Path(folder) / f"result-{r}").read_bytes()) for r in range(world)]


def _entry(rank: int, world: int, folder: str, backend: str, fn: Callable[..., Any], args: tuple, kwargs: dict) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        gpu = torch.device("cuda", rank) if backend == "nccl" else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        meeting = f"file://{folder}/rendezvous"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world, device_id=gpu)
        result = fn(rank, world, *args, **kwargs)
        (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
        _leave_together()
        code = 0
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(code)  # a forked rank must not run the parent's exit handlers


def _leave_together() -> None:
    """A rank that is gone would break the connections that slower ranks are still making."""
    if dist.is_initialized():
        dist.barrier()


def _join(processes: list, deadline: float) -> None:
    """Wait for all; once one has failed, the others get two seconds (they may be waiting for it in a collective)."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 2.0)
        for process in processes:
            process.join(0.01)
            if time.monotonic() > deadline:
                process.kill()
