"""From rows of any file to a batch: the one place where rollouts are checked, whichever reader found them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_support.errors import RolloutError
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.fields import at_place, short
from megatron_support.rollouts.rows import OPTIONAL_TOKEN_COLUMNS, Row, check_row
from megatron_support.types import RolloutSupport


def batch_of_rows(
    path: Path,
    places: Iterator[tuple[str, Any]],
    *,
    vocab_size: int | None = None,
    keep_faults: bool = False,
    names: Mapping[str, str] | None = None,
) -> RolloutBatch:
    """Check rows one by one, and put them end to end.

    Args:
        path: the file, for messages about all of it.
        places: (place, fields) of each row, or (place, what is wrong with it).
        vocab_size, keep_faults: as for :func:`megatron_support.rollouts.read_rollouts`.
        names: the file's own names of our fields, for messages.

    Raises:
        RolloutError: naming file, line (row, sample), field, entry and sample.
    """
    rows = []
    for row in checked_rows(places, vocab_size=vocab_size, keep_faults=keep_faults, names=names):
        if isinstance(row, RolloutError):
            raise row
        rows.append(row)
    if not rows:
        raise RolloutError(f"{path}: no rollouts in it; write one row for each sampled response")
    check_columns(rows)
    return join_rows(rows)


def checked_rows(
    places: Iterator[tuple[str, Any]],
    *,
    vocab_size: int | None,
    keep_faults: bool = False,
    names: Mapping[str, str] | None = None,
) -> Iterator[Row | RolloutError]:
    """Each row, or what is wrong with it."""
    seen: dict[str, str] = {}
    for place, data in places:
        if isinstance(data, RolloutError):
            yield data
            continue
        try:
            row = at_place(place, partial(check_row, data, vocab_size=vocab_size, keep_faults=keep_faults), names)
        except RolloutError as error:
            yield RolloutError(f"{error}{_named(data)}")
            continue
        if row.id in seen:
            yield RolloutError(f"{place}: id: must be unique, got {short(row.id)} as in {seen[row.id]}; rename one")
            continue
        seen[row.id] = place
        yield replace(row, place=place)


def with_equal_columns(rows: list[Row]) -> list[Row]:
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


def check_columns(rows: list[Row]) -> None:
    """Check that rows go together: optional fields are in every one or in none.

    Raises:
        RolloutError: naming the first row that differs, and the field.
    """
    for name in OPTIONAL_TOKEN_COLUMNS:
        without = [row for row in rows if name not in row.columns]
        if without and len(without) < len(rows):
            raise RolloutError(
                f"{without[0].place}: {name}: must be in every row or in none, missing in {short(without[0].id)}; "
                "add it"
            )
    sizes = [len(row.reward_components or ()) for row in rows]
    other = next((row for row, size in zip(rows, sizes, strict=True) if size != sizes[0]), None)
    if other is not None:
        raise RolloutError(
            f"{other.place}: reward_components: must have the same number of entries in every row, got {sizes[0]} in "
            f"{short(rows[0].id)} and {len(other.reward_components or ())} in {short(other.id)}; correct them"
        )
    # without a kept set of its own, a row cannot be replayed beside rows that can
    bare = [row for row in rows if row.support is None]
    if bare and len(bare) < len(rows):
        raise RolloutError(
            f"{bare[0].place}: support: must be in every row or null in all, null in {short(bare[0].id)}; split the "
            "file"
        )


def join_rows(rows: list[Row]) -> RolloutBatch:
    """Checked rows end to end; those with the same prompt_id are one group."""
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
        cu_seqlens=offsets_of([len(row.tokens) for row in rows]),
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
        unknown_fields=frozenset().union(*(row.unknown_fields for row in rows)),
        **columns,
    )


def _named(data: Any) -> str:
    """The sample, behind a message that says the place."""
    name = data.get("id") if isinstance(data, Mapping) else None
    return f" (sample {short(name)})" if isinstance(name, str | int) and not isinstance(name, bool) else ""


def _joined_support(supports: list[tuple[list[int], list[int]] | None]) -> RolloutSupport | None:
    given = [support for support in supports if support is not None]
    if not given:
        return None
    sizes = [b - a for _, offsets in given for a, b in itertools.pairwise(offsets)]
    return RolloutSupport(
        torch.tensor([token for ids, _ in given for token in ids], dtype=torch.int64), offsets_of(sizes)
    )


def offsets_of(sizes: list[int]) -> Tensor:
    """int64 ``[n + 1]``, from 0: where pieces of these sizes begin and end."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(sizes, dtype=torch.int64).cumsum(0)])
