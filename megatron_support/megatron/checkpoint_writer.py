"""Checkpoint folders that are there whole or not at all, written at once or while training goes on.

A folder is written under a temporary name beside its own, ``.NAME.<random>.tmp``. When every rank has written its part
and all of it is on the disk, the first rank renames it: a run that is killed before leaves the temporary folder, which
nothing takes for a checkpoint, and whatever was there before.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_support.distributed.errors import raise_together
from megatron_support.errors import CheckpointError, ConfigurationError
from megatron_support.megatron.writer_process import DEAD, in_one_process, tell_of_death

logger = logging.getLogger(__name__)

_SUFFIX = ".tmp"
# what the first rank writes alone: (module, class or None, function) of Megatron-Core; which exist differs by release
_FIRST_RANK_WRITES = (
    ("megatron.core.dist_checkpointing.strategies.common", "TorchCommonSaveStrategy", "save_common"),
    ("megatron.core.dist_checkpointing.strategies.filesystem_async", "FileSystemWriterAsync", "finish"),
    ("megatron.core.dist_checkpointing.serialization", None, "save_config"),
)
# 0.19 would take NVIDIA's resiliency extension unless told to use the writer whose queue is used here
_STRATEGY: Mapping[str, Any] = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written."""

    path: Path
    temporary: Path


class CheckpointWriter:
    """Writes checkpoint folders, one after the other. Every method is collective.

    Args:
        device: one that torch.distributed's backend works on.
        asynchronous: write in a process of its own (Megatron-Core's AsyncCallsQueue) from a copy in host memory. Where
            Megatron-Core has no such queue, writes are synchronous and one line is logged.
    """

    def __init__(self, device: torch.device, *, asynchronous: bool = False) -> None:
        self._device = device
        self._queue: Any = _async_queue() if asynchronous else None
        self._pending: _Pending | None = None

    @property
    def asynchronous(self) -> bool:
        return self._queue is not None

    def save(self, path: Path, state: Mapping[str, Any], *, metadata: Mapping[str, Any]) -> list[Path]:
        """Write a sharded state, or begin to. A write that is not yet done is waited for.

        Args:
            path: the folder; there must be none of that name, or an empty one.
            state: as :func:`megatron.core.dist_checkpointing.save` takes it.
            metadata: Megatron-Core's ``content_metadata``.

        Returns:
            The folders that were completed meanwhile.

        Raises:
            ConfigurationError: the folder is not empty.
            CheckpointError: this write, or the one before, failed; on every rank.
        """
        done = self.finish()
        self._pending = pending = _Pending(path, self._begin(path))
        request: Any = None

        def prepare() -> None:
            nonlocal request
            request = dist_checkpointing.save(
                dict(state),
                str(pending.temporary),
                async_sharded_save=True,
                content_metadata=dict(metadata),
                preprocess_common_before_consistancy_check=_without_rank_values,
                **_STRATEGY,
            )
            request = in_one_process(request)

        self._guarded(prepare)
        if self._queue is None:
            self._guarded(request.execute_sync)
            return [*done, *self._publish()]
        self._guarded(lambda: self._schedule(request))
        return done

    def _schedule(self, request: Any) -> None:
        """Start the process that writes; if it dies, its rank has that to tell when the ranks collect their results."""
        started: list[Any] = []
        tell = partial(tell_of_death, started, request.async_fn_args)
        self._queue.schedule_async_request(request._replace(finalize_fns=[tell, *request.finalize_fns]))
        started.append(self._queue.async_calls[-1].async_caller.process)

    def poll(self) -> list[Path]:
        """The folder that has been completed since the last call, if all ranks have written it.

        Raises:
            CheckpointError: its write failed; on every rank.
        """
        return self._finalize(blocking=False)

    def finish(self) -> list[Path]:
        """The same after waiting for the write that is not yet done."""
        return self._finalize(blocking=True)

    def _finalize(self, *, blocking: bool) -> list[Path]:
        if self._pending is None or self._queue is None:
            return []
        finalized: list[int] = []
        self._guarded(lambda: finalized.extend(self._queue.maybe_finalize_async_calls(blocking=blocking)))
        return self._publish() if finalized else []

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Run a part of a write; what fails on one rank fails on all, and leaves nothing."""
        error: BaseException | None = None
        with _first_rank_errors() as errors:
            try:
                action()
            except CheckpointException as failed:  # on every rank, with the reasons on the first
                error = next((reason for reason, _ in failed.failures.values()), None)
            except OSError as failed:
                error = failed
        error = errors[0] if errors else error
        self._raise_together(None if error is None else _reason(error))

    def _publish(self) -> list[Path]:
        pending, error = self._pending, None
        assert pending is not None
        if dist.get_rank() == 0:
            try:
                _sync_files(pending.temporary)
                pending.temporary.rename(pending.path)
                sync_folder(pending.path.parent)
            except OSError as failed:
                error = _reason(failed)
        self._raise_together(error)
        self._pending = None
        return [pending.path]

    def _raise_together(self, reason: str | None) -> None:
        pending = self._pending
        assert pending is not None
        error = None
        if reason is not None:
            remedy = "free space on the disk, or choose another logging.run_dir"
            if reason.startswith(DEAD):
                remedy = "free memory of the host, or set checkpoint.async_save=false"
            error = CheckpointError(f"{pending.path}: the checkpoint cannot be written ({reason}); {remedy}")
        try:
            raise_together(error, dist.group.WORLD, self._device)
        except CheckpointError:
            self._pending = None
            if dist.get_rank() == 0:
                shutil.rmtree(pending.temporary, ignore_errors=True)
            raise

    def _begin(self, path: Path) -> Path:
        """Make the temporary folder on the first rank; every rank learns its name."""
        box: list[Any] = [None]
        error: Exception | None = None
        if dist.get_rank() == 0:
            temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_SUFFIX}")
            try:
                if path.exists() and (not path.is_dir() or any(path.iterdir())):
                    raise ConfigurationError(
                        f"{path}: a checkpoint folder must be empty; choose another or remove its contents"
                    )
                temporary.mkdir(parents=True)
                box = [temporary]
            except OSError as failed:
                error = CheckpointError(
                    f"{path}: the folder cannot be made ({_reason(failed)}); choose a folder that can be written"
                )
            except ConfigurationError as failed:
                error = failed
        raise_together(error, dist.group.WORLD, self._device)
        dist.broadcast_object_list(box, src=0, device=self._device)
        return box[0]


def remove_unfinished(folder: Path) -> list[Path]:
    """Remove what killed writes left in a folder. On one rank, while nobody writes there.

    Returns:
        What was removed.
    """
    found = [path for path in folder.glob(f".*{_SUFFIX}") if path.is_dir()] if folder.is_dir() else []
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that a kill in between leaves none of its name."""
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_SUFFIX}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _without_rank_values(common: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks: ``progress`` holds seconds, and is the first rank's."""
    return {name: value for name, value in common.items() if name != "progress"}


def _async_queue() -> Any:
    try:
        module = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
        return module.AsyncCallsQueue()
    except (ImportError, AttributeError):
        logger.warning("checkpoint.async_save: this Megatron-Core has no AsyncCallsQueue; checkpoints are synchronous")
        return None


def _reason(error: BaseException) -> str:
    """The operating system's own words where there are some: an error from a writer process is text by now."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return re.sub(r"^(Worker failure: )?(\[Errno \d+\] )?", "", str(error))


def _owner(module: str, class_name: str | None, function: str) -> Any:
    """The module or class of one of ``_FIRST_RANK_WRITES``; None in a Megatron-Core that has no such function."""
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return None
    owner = owner if class_name is None else getattr(owner, class_name, None)
    return owner if hasattr(owner, function) else None


@contextlib.contextmanager
def _first_rank_errors() -> Iterator[list[OSError]]:
    """Collect what goes wrong where the first rank writes alone: raised there, it would leave the others waiting."""
    errors: list[OSError] = []
    with contextlib.ExitStack() as stack:
        for module_name, class_name, name in _FIRST_RANK_WRITES:
            owner = _owner(module_name, class_name, name)
            if owner is None:
                continue
            original = getattr(owner, name)

            def collecting(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                try:
                    return _original(*args, **kwargs)
                except OSError as error:
                    errors.append(error)
                    return None

            inherited = name not in vars(owner)
            setattr(owner, name, collecting)
            stack.callback(delattr, owner, name) if inherited else stack.callback(setattr, owner, name, original)
        yield errors
