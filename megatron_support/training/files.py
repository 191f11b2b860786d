"""Files that are there whole or as they were before, and folders that can be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_support.config.path_text import check_target


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name of the same ending to write under; at the end of the block it is ``path``, after an error it is gone.

    Raises:
        OSError: as :func:`check_target`, before the block.
    """
    check_target(path)
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Write a text that is there whole or as it was before."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def try_writing(folder: Path) -> None:
    """Make something in a folder and take it away: permissions alone do not tell, for root has all of them.

    Raises:
        OSError: the folder cannot be written.
    """
    tempfile.TemporaryDirectory(dir=folder).cleanup()
