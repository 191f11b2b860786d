"""How the files of a checkpoint are written: by one process for each rank, whose death is not waited for."""

from __future__ import annotations

import contextlib
import gc
import queue
import signal
from functools import partial
from typing import Any

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

DEAD = "the writer process must end with exit code 0"
"""How the reason begins where the process is to blame."""
# what a request calls to write the files of a rank
_WRITES_FILES = tuple(
    getattr(FileSystemWriterAsync, name)
    for name in ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")
    if hasattr(FileSystemWriterAsync, name)
)


def in_one_process(request: Any) -> Any:
    """The same request with the files of a rank written one after the other by the process that it runs in.

    Megatron-Core 0.16 forks a process for each file and waits for ever for one that died; 0.19 has threads, and passes
    on of an error its type alone.
    """
    if getattr(request.async_fn, "func", None) not in _WRITES_FILES:
        return request
    return request._replace(async_fn=partial(_write_files, *request.async_fn.args))


def _write_files(transforms: list[Any], use_msc: bool, rank: int, files: list[Any], results: Any) -> None:
    """What the functions of ``_WRITES_FILES`` do, in this process."""
    written: dict[int, Any] = {}
    collecting = gc.isenabled()
    gc.disable()  # a forked process that frees its parent's tensors would use CUDA
    try:
        for index, file in enumerate(files):
            result: queue.Queue = queue.Queue()
            unfinished: queue.Queue = queue.Queue()
            unfinished.put(index)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, index, file, result, unfinished, use_fsync=True, use_msc=use_msc
            )
            _, written[index] = result.get_nowait()
            if isinstance(written[index], Exception):
                raise written[index]
    except Exception as error:  # noqa: BLE001 - all ranks learn of it when the results are collected
        results.put(_cause(error))
    else:
        results.put(written)
    finally:
        if collecting:
            gc.enable()


def _cause(error: BaseException) -> BaseException:
    """The operating system's error where there was one: torch's zip writer, when closed after it, raises another."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return found or error


def tell_of_death(started: list[Any], arguments: tuple) -> None:
    """Put the end of this rank's writer process where its results should be."""
    (process,) = started
    if process is None or process.exitcode == 0:
        return
    _, _, results = arguments
    code = process.exitcode
    with contextlib.suppress(queue.Empty):
        results.get_nowait()  # of a process that died afterwards
    results.put(RuntimeError(f"{DEAD}, got {_signal_name(-code) if code < 0 else code}"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has a number alone
        return f"signal {number}"
