"""Rollout files: JSONL and Parquet of one schema, read into a RolloutBatch and written from one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_support.errors import RolloutError
from megatron_support.rollouts.batch import PER_TOKEN, RolloutBatch, shortest_decimal
from megatron_support.rollouts.rows import OPTIONAL_TOKEN_COLUMNS, Row, at_place, check_row
from megatron_support.types import RolloutSupport

_PARQUET_ROWS = 1024


def read_rollouts(path: str | Path, *, vocab_size: int | None = None) -> RolloutBatch:
    """Read a rollout file.

    A row has the fields id, prompt_id, prompt, response, tokens ``[L]``, response_mask ``[L]``, generation_logprobs
    ``[L]`` (under the row's filter; anything outside the response; -inf, in JSON ``-Infinity``, where the engine says a
    token is outside its support), reward, sampling {temperature, top_k, top_p}, support {token_ids ``[N]``, offsets
    ``[L + 1]``} or null, and optionally sample_mask, reward_components ``[K]`` and per-token columns of a RolloutBatch.
    Other fields are left out. Rows with the same prompt_id are one group.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file.
        vocab_size: token ids at or above it are refused; None for no bound.

    Raises:
        RolloutError: naming file, line (or row), field, value and remedy.
    """
    path = Path(path)
    rows = []
    for row in _checked_rows(path, vocab_size):
        if isinstance(row, RolloutError):
            raise row
        rows.append(row)
    if not rows:
        raise RolloutError(f"{path}: no rollouts in it; write one row for each sampled response")
    _check_columns(path, rows)
    return _batch(rows)


def read_sound_rollouts(
    path: str | Path, *, vocab_size: int | None = None
) -> tuple[RolloutBatch | None, tuple[RolloutError, ...]]:
    """The rows of a file that can be read, and what is wrong with the others: for looking at a file before training.

    Args:
        path, vocab_size: as for :func:`read_rollouts`.

    Returns:
        The sound rows (None if there is none), and the errors in the order of the file. A file that cannot be read on
        from some place is read up to it.

    Raises:
        RolloutError: no part of the file can be read.
    """
    path = Path(path)
    rows: list[Row] = []
    errors: list[RolloutError] = []
    checked = _checked_rows(path, vocab_size)
    try:
        for row in checked:
            if isinstance(row, RolloutError):
                errors.append(row)
            else:
                rows.append(row)
        if rows:
            _check_columns(path, rows)
    except RolloutError as error:
        if not rows and not errors:  # nothing of it could be read
            raise
        errors.append(error)
        rows = _with_equal_columns(rows)
    return (_batch(rows) if rows else None), tuple(errors)


def _checked_rows(path: Path, vocab_size: int | None) -> Iterator[Row | RolloutError]:
    """Each row, or what is wrong with it."""
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise RolloutError(
            f"{path}: the name must end in .jsonl or .parquet, got {path.suffix!r}; convert or rename it"
        )
    places: dict[str, str] = {}
    for place, data in reader(path):
        if isinstance(data, RolloutError):
            yield data
            continue
        try:
            row = at_place(place, partial(check_row, data, vocab_size=vocab_size))
        except RolloutError as error:
            yield error
            continue
        if row.id in places:
            yield RolloutError(f"{place}: id: must be unique, got {row.id!r} as in {places[row.id]}; rename one")
            continue
        places[row.id] = place
        yield row


def _with_equal_columns(rows: list[Row]) -> list[Row]:
    """The rows with the optional fields that all of them have."""
    if not rows:
        return rows
    common = set.intersection(*(set(row.columns) for row in rows))
    components = len({len(row.reward_components or ()) for row in rows}) == 1
    supported = all(row.support is not None for row in rows)
    return [
        replace(
            row,
            columns={name: values for name, values in row.columns.items() if name in common},
            reward_components=row.reward_components if components else None,
            support=row.support if supported else None,
        )
        for row in rows
    ]


def write_rollouts(path: str | Path, rollouts: RolloutBatch) -> None:
    """Write a batch as ``.jsonl`` or ``.parquet``; :func:`read_rollouts` gives it back, -inf included.

    Raises:
        RolloutError: another ending, or a folder that cannot be written.
    """
    path = Path(path)
    try:
        if path.suffix == ".jsonl":
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in _plain_rows(rollouts))
        elif path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(list(_plain_rows(rollouts))), path)
        else:
            raise RolloutError(f"{path}: the name must end in .jsonl or .parquet, got {path.suffix!r}; rename it")
    except OSError as error:
        raise RolloutError(f"{path}: cannot write rollouts ({error}); give a folder that exists and has room") from None


def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """The sequences of several batches, one after the other. Groups of different batches stay apart.

    Where two samples share an id, every id gets its batch's number in front.

    Raises:
        RolloutError: there is no batch, or an optional column is in some batches and not in others.
    """
    if not batches:
        raise RolloutError("at least one batch is needed to concatenate, got none; pass one")
    if len(batches) == 1:
        return batches[0]
    joined: dict[str, Any] = {}
    for name in (f.name for f in fields(RolloutBatch)):
        values = [getattr(batch, name) for batch in batches]
        missing = [value is None for value in values]
        if any(missing) and not all(missing):
            raise RolloutError(
                f"{name} must be in every batch or in none, it is missing in batch {missing.index(True)}"
            )
        joined[name] = None if all(missing) else _join(name, values)
    ids = joined["sample_ids"]
    if len(set(ids)) < len(ids):
        joined["sample_ids"] = tuple(f"{i}:{name}" for i, batch in enumerate(batches) for name in batch.sample_ids)
    return RolloutBatch(**joined)


def _join(name: str, values: list[Any]) -> Any:
    if name == "cu_seqlens":
        return _offsets([length for value in values for length in value.diff().tolist()])
    if name == "group_ids":
        shifts = torch.tensor([0, *(int(value.max()) + 1 for value in values[:-1])]).cumsum(0)
        return torch.cat([value + shift for value, shift in zip(values, shifts, strict=True)])
    if name == "support":
        sizes = [size for value in values for size in value.offsets.diff().tolist()]
        return RolloutSupport(torch.cat([value.token_ids for value in values]), _offsets(sizes))
    if isinstance(values[0], tuple):
        return tuple(entry for value in values for entry in value)
    return torch.cat(values)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, data) of each line, an error for a line that is no JSON; empty lines are passed over."""
    try:
        with path.open("rb") as file:  # bytes: a line that is not UTF-8 is named by its own number
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(f"{path}:{number}", line)
    except OSError as error:
        raise RolloutError(f"{path}: cannot read it ({error}); give a readable UTF-8 JSONL file") from None


def _parse(place: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RolloutError(f"{place}: not UTF-8 text ({error}); write the file as UTF-8")
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        return RolloutError(f"{place}: not valid JSON ({error}); write one object a line")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        with pq.ParquetFile(path) as file:
            for part in file.iter_batches(_PARQUET_ROWS):
                for data in part.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", data
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise RolloutError(f"{path}: cannot read it ({error}); give a readable Parquet file") from None


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {".jsonl": _json_rows, ".parquet": _parquet_rows}


def _check_columns(path: Path, rows: list[Row]) -> None:
    """Optional columns are in every row or in none."""
    for name in OPTIONAL_TOKEN_COLUMNS:
        without = [row.id for row in rows if name not in row.columns]
        if without and len(without) < len(rows):
            raise RolloutError(f"{path}: {name}: must be in every row or in none, missing in {without[0]!r}; add it")
    components = {len(row.reward_components or ()): row.id for row in rows}
    if len(components) > 1:
        raise RolloutError(
            f"{path}: reward_components: must have the same number of entries in every row, got "
            f"{', '.join(f'{n} in {name!r}' for n, name in sorted(components.items()))}; correct them"
        )
    # without a kept set of its own, a row cannot be replayed beside rows that can
    bare = [row.id for row in rows if row.support is None]
    if bare and len(bare) < len(rows):
        raise RolloutError(f"{path}: support: must be in every row or null in all, null in {bare[0]!r}; split the file")


def _batch(rows: list[Row]) -> RolloutBatch:
    groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(row.prompt_id for row in rows))}

    def tokens(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([entry for row in rows for entry in getattr(row, name)], dtype=dtype)

    def sequences(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    columns = {
        name: torch.tensor([entry for row in rows for entry in row.columns[name]], dtype=torch.float32)
        for name in rows[0].columns
    }
    return RolloutBatch(
        tokens=tokens("tokens", torch.int64),
        cu_seqlens=_offsets([len(row.tokens) for row in rows]),
        response_mask=tokens("response_mask", torch.bool),
        generation_logprobs=tokens("generation_logprobs", torch.float32),
        rewards=sequences("reward", torch.float32),
        reward_components=sequences("reward_components", torch.float32) if rows[0].reward_components else None,
        sample_mask=sequences("sample_mask", torch.bool),
        group_ids=torch.tensor([groups[row.prompt_id] for row in rows]),
        temperature=sequences("temperature", torch.float32),
        top_k=sequences("top_k", torch.int64),
        top_p=sequences("top_p", torch.float32),
        sample_ids=tuple(row.id for row in rows),
        prompts=tuple(row.prompt for row in rows),
        responses=tuple(row.response for row in rows),
        support=_joined_support([row.support for row in rows]),
        **columns,
    )


def _joined_support(supports: list[tuple[list[int], list[int]] | None]) -> RolloutSupport | None:
    given = [support for support in supports if support is not None]
    if not given:
        return None
    sizes = [b - a for _, offsets in given for a, b in itertools.pairwise(offsets)]
    return RolloutSupport(
        torch.tensor([token for ids, _ in given for token in ids], dtype=torch.int64), _offsets(sizes)
    )


def _offsets(sizes: list[int]) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(sizes, dtype=torch.int64).cumsum(0)])


def _plain_rows(rollouts: RolloutBatch) -> Iterator[dict[str, Any]]:
    columns = [name for name in PER_TOKEN if getattr(rollouts, name) is not None]
    components = rollouts.reward_components
    for s in range(rollouts.num_sequences):
        start, end = rollouts.cu_seqlens[s : s + 2].tolist()
        yield {
            "id": rollouts.sample_ids[s],
            "prompt_id": int(rollouts.group_ids[s]),
            "prompt": rollouts.prompts[s] if rollouts.prompts else "",
            "response": rollouts.responses[s] if rollouts.responses else "",
            **{name: getattr(rollouts, name)[start:end].tolist() for name in columns},
            "reward": float(rollouts.rewards[s]),
            **({} if components is None else {"reward_components": components[s].tolist()}),
            "sample_mask": bool(rollouts.sample_mask[s]),
            "sampling": {
                "temperature": shortest_decimal(float(rollouts.temperature[s])),
                "top_k": int(rollouts.top_k[s]) or None,
                "top_p": shortest_decimal(float(rollouts.top_p[s])),
            },
            "support": _plain_support(rollouts.support, start, end),
        }


def _plain_support(support: RolloutSupport | None, start: int, end: int) -> dict[str, list[int]] | None:
    if support is None:
        return None
    offsets = support.offsets[start : end + 1]
    ids = support.token_ids[int(offsets[0]) : int(offsets[-1])]
    return {"token_ids": ids.tolist(), "offsets": (offsets - offsets[0]).tolist()}
