"""Rows of JSONL and Parquet files as plain values, unchecked; a damaged file gives a message, never memory or time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_support.errors import RolloutError
from megatron_support.rollouts.fields import short
from megatron_support.rollouts.rows import FIELDS, TEXT_FIELDS

_PARQUET_ROWS = 1024
_VALUES_PER_BYTE = 256
"""Far above what real rollouts reach: their token ids alone take a byte or more each."""


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, data) of each line, an error for a line that is no JSON; empty lines are passed over."""
    check_file(path)
    try:
        with path.open("rb") as file:  # bytes: a line that is not UTF-8 is named by its own number
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(f"{path}:{number}", line)
    except OSError as error:
        raise RolloutError(f"{path}: cannot read it ({error}); give a readable UTF-8 JSONL file") from None


def check_file(path: Path) -> None:
    """Refuse what would block or never end: a pipe, a device.

    Raises:
        RolloutError: the path exists and is neither a file nor a folder.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise RolloutError(f"{path}: must be a regular file; write what it gives into one")


def _parse(place: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        return RolloutError(f"{place}: not UTF-8 text ({error}); write the file as UTF-8")
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        return RolloutError(f"{place}: not valid JSON ({error}); write one object a line")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose fields are there once: which of two counts is anyone's guess."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError(f"field {short(_first_twice(name for name, _ in pairs))} twice in one object")
    return result


def _first_twice(names: Iterable[str]) -> str | None:
    """The first name that was there before."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, data) of each row: its fields of a rollout alone. Pages with a checksum, which
    :func:`megatron_support.rollouts.write_rollouts` writes, are checked.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_file(path)
    try:
        limit = _VALUES_PER_BYTE * path.stat().st_size
        with pq.ParquetFile(path) as file:
            names = _fields_of(path, file.schema_arrow.names)
            texts = _check_claims(path, file.metadata, names, limit)
        number = characters = 0
        with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=texts) as file:
            for part in file.iter_batches(_PARQUET_ROWS, columns=names):
                characters += sum(_text_size(column) for column in part.columns)
                if characters > limit:  # a text that is there once and stands in many rows
                    raise RolloutError(
                        f"{path}: row {number + 1}: texts must come to at most {limit} bytes in a file of this size, "
                        f"got {characters}; write the file again"
                    )
                for data in part.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", data
    except RolloutError:
        raise
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, pa.ArrowException) as error:
        raise RolloutError(f"{path}: cannot read it ({error}); give a readable Parquet file") from None


def _fields_of(path: Path, columns: list[str]) -> list[str]:
    """The columns that are fields of a rollout."""
    twice = _first_twice(columns)
    if twice is not None:
        raise RolloutError(f"{path}: column {short(twice)} is there twice; write the file with one")
    names = [name for name in columns if name in FIELDS]
    if not names:
        raise RolloutError(f"{path}: no column of a rollout in it; name them {', '.join(FIELDS[:4])}, ...")
    return names


def _check_claims(path: Path, metadata: Any, names: list[str], limit: int) -> list[str]:
    """Check sizes before anything is read; returns the columns of text.

    Runs of one value and compressed pages take no space in Parquet, so a small file can claim to hold more than any
    memory.
    """
    texts = []
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            name = chunk.path_in_schema.split(".")[0]
            if name not in names:
                continue
            if chunk.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
                if name not in TEXT_FIELDS:
                    raise RolloutError(f"{path}: {chunk.path_in_schema}: must hold numbers, got text; write numbers")
                texts.append(chunk.path_in_schema)
            for size, unit in ((chunk.num_values, "values"), (chunk.total_uncompressed_size, "bytes")):
                if size > limit:
                    raise RolloutError(
                        f"{path}: row group {group}: {chunk.path_in_schema}: must hold at most {limit} {unit} in a "
                        f"file of this size, got {size}; write the file again"
                    )
    return sorted({*texts})


def _text_size(column: Any) -> int:
    """Bytes of a column's texts when every row has its own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        return pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _text_size(column.flatten())
    return 0
