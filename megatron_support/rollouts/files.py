"""Rollout files: JSONL and Parquet of one schema, read into a RolloutBatch and written from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from megatron_support.config.path_text import check_target
from megatron_support.errors import RolloutError
from megatron_support.rollouts.batch import PER_TOKEN, RolloutBatch, shortest_decimal
from megatron_support.rollouts.raw_rows import json_rows, parquet_rows
from megatron_support.rollouts.rows import Row
from megatron_support.rollouts.validation import (
    batch_of_rows,
    check_columns,
    checked_rows,
    join_rows,
    offsets_of,
    with_equal_columns,
)
from megatron_support.types import RolloutSupport


def read_rollouts(path: str | Path, *, vocab_size: int | None = None, keep_faults: bool = False) -> RolloutBatch:
    """Read a rollout file.

    A row has the fields id, prompt_id, prompt, response, tokens ``[L]``, response_mask ``[L]``, generation_logprobs
    ``[L]`` (under the row's filter; anything outside the response; -inf, in JSON ``-Infinity``, where the engine says a
    token is outside its support), reward, sampling {temperature, top_k, top_p}, support {token_ids ``[N]``, offsets
    ``[L + 1]``} or null, and optionally sample_mask, reward_components ``[K]``, unknown_fields (names) and per-token
    columns of a RolloutBatch. Other fields are left out. Rows with the same prompt_id are one group. Files of other
    programs are read by :func:`megatron_support.rollouts.readers.read_dump`.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file.
        vocab_size: token ids at or above it are refused; None for no bound.
        keep_faults: take NaN and infinities in per-token columns as they are. Training refuses them; this is for
            looking into a fault.

    Raises:
        RolloutError: naming file, line (or row), field, value and remedy.
    """
    path = Path(path)
    places = _reader(path)(path)
    return batch_of_rows(path, places, vocab_size=vocab_size, keep_faults=keep_faults)


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
    checked = checked_rows(_reader(path)(path), vocab_size=vocab_size)
    try:
        for row in checked:
            if isinstance(row, RolloutError):
                errors.append(row)
            else:
                rows.append(row)
        if rows:
            check_columns(rows)
    except RolloutError as error:
        if not rows and not errors:  # nothing of it could be read
            raise
        errors.append(error)
        rows = with_equal_columns(rows)
    return (join_rows(rows) if rows else None), tuple(errors)


def check_ending(path: Path) -> None:
    """Check that a rollout file is one by its name.

    Raises:
        RolloutError: it ends otherwise.
    """
    if path.suffix not in _READERS:
        raise RolloutError(
            f"{path}: the name must end in .jsonl or .parquet, got {path.suffix!r}; convert or rename it "
            "(megatron-support convert)"
        )


def _reader(path: Path) -> Callable[[Path], Iterator[tuple[str, Any]]]:
    check_ending(path)
    return _READERS[path.suffix]


def write_rollouts(path: str | Path, rollouts: RolloutBatch) -> None:
    """Write a batch as ``.jsonl`` or ``.parquet``; :func:`read_rollouts` gives it back, -inf included.

    Raises:
        RolloutError: another ending, or a folder that cannot be written.
    """
    path = Path(path)
    check_ending(path)
    try:
        check_target(path)
        if path.suffix == ".jsonl":
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in _plain_rows(rollouts))
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(list(_plain_rows(rollouts))), path, write_page_checksum=True)
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
    joined: dict[str, Any] = {"unknown_fields": frozenset().union(*(batch.unknown_fields for batch in batches))}
    for name in (f.name for f in fields(RolloutBatch) if f.name not in joined):
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
        return offsets_of([length for value in values for length in value.diff().tolist()])
    if name == "group_ids":
        shifts = torch.tensor([0, *(int(value.max()) + 1 for value in values[:-1])]).cumsum(0)
        return torch.cat([value + shift for value, shift in zip(values, shifts, strict=True)])
    if name == "support":
        sizes = [size for value in values for size in value.offsets.diff().tolist()]
        return RolloutSupport(torch.cat([value.token_ids for value in values]), offsets_of(sizes))
    if isinstance(values[0], tuple):
        return tuple(entry for value in values for entry in value)
    return torch.cat(values)


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {".jsonl": json_rows, ".parquet": parquet_rows}


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
            **({"unknown_fields": sorted(rollouts.unknown_fields)} if rollouts.unknown_fields else {}),
        }


def _plain_support(support: RolloutSupport | None, start: int, end: int) -> dict[str, list[int]] | None:
    if support is None:
        return None
    offsets = support.offsets[start : end + 1]
    ids = support.token_ids[int(offsets[0]) : int(offsets[-1])]
    return {"token_ids": ids.tolist(), "offsets": (offsets - offsets[0]).tolist()}
