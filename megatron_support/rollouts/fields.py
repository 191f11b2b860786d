"""Fields of a row of plain values, whatever file it is from: taken by kind and length, or refused by name."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron_support.errors import RolloutError

Result = TypeVar("Result")

MAX_INTEGER = 2**63
"""Ids and top_k are kept in int64."""


class FieldError(ValueError):
    """A field of a row breaks a rule; the reader adds file and line."""


def required(data: Mapping[str, Any], name: str, kinds: tuple[type, ...], description: str, prefix: str = "") -> Any:
    """The field, of one of the kinds.

    Raises:
        FieldError: it is missing, or of another kind.
    """
    value = data.get(name)
    if value is None:
        raise FieldError(f"{prefix}{name}: required and missing; add it")
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise FieldError(f"{prefix}{name}: must be {description}, got {short(value)}; correct it")
    return value


def listed(data: Mapping[str, Any], name: str, length: int | None, prefix: str = "") -> list[Any]:
    """The field, a list of so many entries (None for any number).

    Raises:
        FieldError: it is missing, no list, or of another length.
    """
    values = required(data, name, (list,), "a list", prefix)
    if length is not None and len(values) != length:
        raise FieldError(f"{prefix}{name}: must have {length} entries, got {len(values)}; one for each token")
    return values


def flag(value: Any, name: str) -> bool:
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise FieldError(f"{name}: must be 0 or 1, got {short(value)}; correct it")


def short(value: Any) -> str:
    """A value for a message."""
    if type(value) is int and abs(value) >= MAX_INTEGER:
        return "an integer beyond 64 bits"  # printing thousands of digits fails
    text = reprlib.repr(value)  # bounded in depth and length, whatever the file holds
    return text if len(text) <= 60 else f"{text[:57]}..."


def at_place(place: str, check: Callable[[], Result], names: Mapping[str, str] | None = None) -> Result:
    """Run a check and put the place (file and line) in front of its message.

    Args:
        place: of the row.
        check: what to run.
        names: the file's own names of our fields, where they differ; named beside ours.

    Raises:
        RolloutError: the check's message with its place.
    """
    try:
        return check()
    except FieldError as error:
        message = str(error)
        ours = re.split(r"[:\[]", message, maxsplit=1)[0]
        own = (names or {}).get(ours) or (names or {}).get(ours.split(".")[0], ours)
        raise RolloutError(f"{place}: {f'{own}, read as ' if own != ours else ''}{message}") from None
