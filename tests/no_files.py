"""What may stand where a file is to be written and is none: a pipe, a device, a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = ("pipe", "device", "folder")


@contextmanager
def standing(path: Path, kind: str) -> Iterator[None]:
    """It for the length of a ``with`` block; fails where it was written to or replaced.

    The pipe has a reader, so that a write to it fails the test instead of waiting for one.
    """
    if kind == "folder":
        path.mkdir()
        yield
        assert list(path.iterdir()) == []
        path.rmdir()
        return
    if kind == "device":
        path.symlink_to("/dev/null")
        yield
        assert path.is_symlink()
    else:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            yield
            assert os.read(reader, 1) == b"" and path.is_fifo()
        finally:
            os.close(reader)
    path.unlink()
