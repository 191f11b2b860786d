"""A lock on a file of a run folder, so that no second process continues a run that is going on."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import Any


def lock_file(path: Path) -> Any:
    """Lock an existing file until what is returned is closed, or the process ends.

    The lock is that of POSIX: the kernel drops it when the process dies, however it dies, and a process forked from it
    does not hold it. No other code of the process may open the file, since closing it would drop the lock. On a file
    system without locks nothing is locked.
    """
    file = path.open("r+", encoding="utf-8")
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock."""
    try:
        with path.open("r+", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
