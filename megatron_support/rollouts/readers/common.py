"""What the readers of other programs' dumps share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_support.errors import RolloutError
from megatron_support.rollouts.fields import MAX_INTEGER, FieldError, listed, required, short
from megatron_support.rollouts.raw_rows import json_rows
from megatron_support.rollouts.rows import check_ids

NonFinite = Literal["refuse", "outside", "mask"]


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a dump does not say and its user may know."""

    sampling: Mapping[str, Any] | None = None
    """temperature, top_k and top_p of every row. None: not known, temperature 1 without a filter stands for it."""
    reward_key: str | None = None
    """Which reward, where a dump holds several by name."""
    nonfinite: NonFinite = "refuse"
    """A value that was not finite and is lost (prime-rl's null) at a response token: an error; or -inf, outside the
    support; or the sample is masked."""


@dataclass(kw_only=True)
class Reading:
    """A file that is being read: rows of our schema, and what is to be said about them afterwards."""

    rows: Iterator[tuple[str, Any]]
    """(place, fields) of each row."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The dump's names of our fields, where they differ."""
    unknown: frozenset[str] = frozenset()
    """Fields of a RolloutBatch that the dump does not hold, or holds with their -inf lost."""
    notes: list[str] = field(default_factory=list)
    """What is unknown, lost or assumed; complete when the rows have been read."""


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, data) of each line.

    Raises:
        RolloutError: a line that is no JSON.
    """
    for place, data in json_rows(path):
        if isinstance(data, RolloutError):
            raise data
        yield place, data


def sampling_of(assumptions: Assumptions) -> Mapping[str, Any]:
    return {"temperature": 1.0} if assumptions.sampling is None else assumptions.sampling


def prompt_id(tokens: Sequence[Any], mask: Sequence[Any]) -> str:
    """A name for the prompt, the tokens before the first response token: equal prompts are one group.

    Raises:
        FieldError: a prompt token is no token id.
    """
    length = next((position for position, entry in enumerate(mask) if entry), len(tokens))
    check_ids("tokens", tokens[:length])
    return hashlib.blake2b(repr(list(tokens[:length])).encode(), digest_size=8).hexdigest()


def flags(data: Mapping[str, Any], name: str, length: int | None) -> list[Any]:
    """A list of 0 and 1, which some programs write as floats; what is neither stays for the check of the row."""
    values = listed(data, name, length)
    return [int(value) if type(value) is float and value in (0.0, 1.0) else value for value in values]


def integer(data: Mapping[str, Any], name: str, *, least: int = 0, most: int = MAX_INTEGER - 1) -> int:
    """A field that is an integer in [least, most].

    Raises:
        FieldError: it is missing, no integer, or outside.
    """
    value = required(data, name, (int,), "an integer")
    if not least <= value <= most:
        raise FieldError(f"{name}: must be in [{least}, {most}], got {short(value)}; correct it or drop the row")
    return value


def mapping(data: Any) -> Mapping[str, Any]:
    """The row itself.

    Raises:
        FieldError: it is no object of fields.
    """
    if not isinstance(data, Mapping):
        raise FieldError(f"a row must be an object of fields, got {short(data)}; drop it")
    return data


def on_response(values: Sequence[Any], mask_length: int) -> list[Any]:
    """Entries of the last tokens, with zeros in front for the prompt."""
    return [0.0] * (mask_length - len(values)) + list(values)
