"""An exception that one rank alone meets ends all ranks, soon, and one of them says why."""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_support.distributed.errors import error_like, kind_of
from megatron_support.errors import PeerError

_POLL_SECONDS = 0.5
_HEAD_START_SECONDS = 0.5
_STUCK = 70
"""Exit code of a rank that could not be told in any other way (EX_SOFTWARE)."""


@dataclass(frozen=True, kw_only=True)
class Post:
    """What the first rank that failed has said."""

    rank: int
    kind: str
    """Name of the exception's nearest known type; empty for one from elsewhere."""
    message: str


@contextmanager
def one_error(*, device: torch.device | None = None, grace: float = 10.0) -> Iterator[None]:
    """Make the first exception of any rank that of all ranks, for the length of a ``with`` block.

    The first rank that fails posts its exception where the ranks have met (torch.distributed's store), and raises it. A
    rank that fails afterwards, mostly because its peer has left a collective, raises what was posted instead. A rank
    that waits for a peer without noticing is ended ``grace`` seconds after the post, with exit code 70 and a line that
    names the post: no rank waits for the timeout of the process group.

    torch.distributed must be up. With one rank it does nothing.

    Args:
        device: one that the backend works on; None for the CPU.
        grace: seconds between a post and the end of a rank that does not notice.

    Raises:
        Exception: this rank's own, or one of the posted kind and message. Its ``spoken`` says whether another rank
            tells the user; :class:`megatron_support.errors.PeerError` where the posted kind is not one of ours.
    """
    if dist.get_world_size() == 1:
        yield
        return
    # a store may outlive ranks that a launcher starts again: a post is of this block of these ranks alone
    block = torch.tensor([secrets.randbits(62)], device=device)
    dist.broadcast(block, src=0)
    board = _Board(_store(), int(block))
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(board, stop, grace), daemon=True, name="one_error")
    watcher.start()
    try:
        with _exit_as_error():
            yield
    except Exception as error:
        stop.set()
        posted = board.post(error)
        if posted is None:
            raise
        if posted.rank == dist.get_rank():
            error.spoken = False  # type: ignore[attr-defined]
            raise
        # the rank that posted speaks; a launcher ends all ranks when the first one leaves
        time.sleep(_HEAD_START_SECONDS)
        raise _of(posted) from error
    finally:
        stop.set()


@contextmanager
def _exit_as_error() -> Iterator[None]:
    """A reward or a surrogate that calls sys.exit must not leave the other ranks waiting, nor pass for success."""
    try:
        yield
    except SystemExit as exit_call:
        raise RuntimeError(
            f"code of this run called sys.exit({exit_call.code!r}); raise an exception instead"
        ) from exit_call


class _Board:
    """One post in a store that all ranks reach."""

    def __init__(self, store: Any, block: int) -> None:
        self._store = store
        self._key = f"megatron_support/error/{block}"

    def post(self, error: Exception) -> Post | None:
        """Post an exception unless there is a post; returns the post there is. None where the store is gone."""
        own = Post(rank=dist.get_rank(), kind=_kind(error), message=_text(error))
        try:
            if self._store.add(f"{self._key}/count", 1) == 1:
                self._store.set(f"{self._key}/post", json.dumps(vars(own)))
                return own
            self._store.wait([f"{self._key}/post"], timedelta(seconds=10))
            return self._read()
        except RuntimeError:  # the rank that keeps the store has left
            return None

    def look(self) -> Post | None:
        """The post there is, if any."""
        try:
            return self._read() if self._store.check([f"{self._key}/post"]) else None
        except RuntimeError:
            return None

    def _read(self) -> Post:
        return Post(**json.loads(self._store.get(f"{self._key}/post")))


def _store() -> Any:
    """A connection of our own: the main thread may be waiting on the other."""
    store = dist.distributed_c10d._get_default_store()
    kept = store
    while isinstance(kept, dist.PrefixStore):
        kept = kept.underlying_store
    # every call opens the file anew, and a clone that cannot write into it when it goes would abort the process
    return store if isinstance(kept, dist.FileStore) or not hasattr(store, "clone") else store.clone()


def _watch(board: _Board, stop: threading.Event, grace: float) -> None:
    while not stop.wait(_POLL_SECONDS):
        posted = board.look()
        if posted is None or posted.rank == dist.get_rank():
            continue
        if stop.wait(grace):
            return
        sys.stderr.write(f"rank {dist.get_rank()} ends: rank {posted.rank} has failed: {posted.message}\n")
        sys.stderr.flush()
        os._exit(_STUCK)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a user's exception whose own __str__ fails
        return f"{type(error).__name__}, whose text cannot be made ({type(broken).__name__})"


def _kind(error: Exception) -> str:
    """The kinds that the command line answers with a message; anything else shows its traceback where it happened."""
    kind = kind_of(error) or ""
    return "" if kind in ("ValueError", "RuntimeError") else kind


def _of(posted: Post) -> Exception:
    message = f"rank {posted.rank}: {posted.message}"
    error = error_like(posted.kind, posted.message) if posted.kind else PeerError(message)
    error.spoken = True  # type: ignore[attr-defined]
    return error
