"""What a path must be so that a file can have that name and can be written, checked before anything is opened."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

MAX_NAME = 255
"""Bytes of one name between slashes, on Linux's file systems."""
MAX_PATH = 4095 - 512
"""Bytes of a whole path, as it is given and from the root: Linux's PATH_MAX without its end, less room for what a run
or an export makes below it."""


def check_path(path: str) -> str:
    """The same path.

    Raises:
        ValueError: no file can have it: the message names rule, value and remedy.
    """
    try:
        given = os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(f"must be a path in UTF-8, got {_short(path)}; correct it") from None
    if b"\0" in given:
        raise ValueError(f"must be a path without NUL characters, got {_short(path)}; take them out")
    size = max(len(given), len(os.path.abspath(given)))
    if size > MAX_PATH:
        raise ValueError(f"must be a path of at most {MAX_PATH} bytes, got {size}: {_short(path)}; give a shorter one")
    longest = max(map(len, given.split(b"/")))
    if longest > MAX_NAME:
        raise ValueError(
            f"must be a path of names of at most {MAX_NAME} bytes, got one of {longest}: {_short(path)}; shorten it"
        )
    return path


def check_target(path: Path) -> None:
    """Refuse to write where a write would block or go to a device: what is there must be a regular file.

    Raises:
        OSError: a pipe, a device, a socket or a folder has that name; links are followed.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "what is there is no regular file", str(path))


def _short(path: str) -> str:
    return ascii(path if len(path) <= 60 else f"{path[:57]}...")


PathText = Annotated[str, AfterValidator(check_path)]
"""A field of a recipe that names a file or a folder."""
