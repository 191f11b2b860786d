"""prime-rl: ``token_exports/step_<N>/rank_<R>.jsonl``, written by ``TokenExporter`` (schema_version 1).

A line is one packed sequence. Entry t of a log-probability is about token t. ``trainer_logprobs`` are those of the
forward pass that the loss read. ``null`` stands for any number that was not finite; a column of nulls was not there.
``rewards``, one a token, are in newer files. Prompt groups and sampling parameters are not in the file.

Read from PrimeIntellect-ai/prime-rl 559b44772e471d1538537b8805cc77f3824a5e64: src/prime_rl/trainer/rl/token_export.py,
src/prime_rl/trainer/rl/train.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_support.errors import RolloutError
from megatron_support.rollouts.fields import FieldError, at_place, listed
from megatron_support.rollouts.readers.common import (
    Assumptions,
    Reading,
    integer,
    json_lines,
    mapping,
    prompt_id,
    sampling_of,
)

SCHEMA_VERSION = 1

_LOGPROBS = {"generation_logprobs": "inference_logprobs", "curr_logprobs": "trainer_logprobs"}
_COLUMNS = {**_LOGPROBS, "advantages": "advantages", "entropy": "entropy"}


def looks_like(first: Mapping[str, Any]) -> bool:
    """Whether the first row of a JSONL file is one of this format."""
    return {"schema_version", "inference_logprobs", "trainer_logprobs"} <= first.keys()


def files_of(path: Path) -> list[Path]:
    """The file itself, or the ranks' files of a step's folder."""
    return sorted(path.glob("rank_*.jsonl")) if path.is_dir() else [path]


def read(path: Path, assumptions: Assumptions) -> Reading:
    """Read a file, or the folder of a step."""
    files = files_of(path)
    if not files:
        raise RolloutError(f"{path}: no rank_*.jsonl in it; give a file or the folder of a step of token_exports")
    reading = Reading(
        rows=iter(()),
        names={"tokens": "token_ids", "response_mask": "loss_mask", **_COLUMNS},
        notes=["groups: not in the file; rows with the same prompt tokens are one"],
    )
    reading.rows = _rows(files, assumptions, reading)
    return reading


def _rows(files: list[Path], assumptions: Assumptions, reading: Reading) -> Iterator[tuple[str, Any]]:
    lost = unrewarded = 0
    for file in files:
        for place, data in json_lines(file):
            row, found = at_place(place, partial(_row, data, assumptions), reading.names)
            lost += found
            unrewarded += row["reward"] is None
            yield place, row if row["reward"] is not None else {**row, "reward": 0.0, "unknown_fields": ["rewards"]}
    if unrewarded:
        reading.notes.append(
            f"rewards: not in {unrewarded} rows; 0 stands for each (the advantages that came of them are there)"
        )
    if lost:
        done = "taken as -inf" if assumptions.nonfinite == "outside" else "their samples are masked"
        reading.notes.append(f"null at {lost} response tokens: NaN or infinite, the file does not say which; {done}")


def _row(data: Any, assumptions: Assumptions) -> tuple[dict[str, Any], int]:
    """The row, and how many numbers at response tokens were not finite and are lost."""
    data = mapping(data)
    version = integer(data, "schema_version")
    if version != SCHEMA_VERSION:
        raise FieldError(f"schema_version: must be {SCHEMA_VERSION}, got {version}; convert it with what wrote it")
    tokens = listed(data, "token_ids", None)
    mask = listed(data, "loss_mask", len(tokens))
    columns = {ours: list(listed(data, theirs, len(tokens))) for ours, theirs in _COLUMNS.items()}
    if all(value is None for value in columns["advantages"]):
        del columns["advantages"]  # the batch had none: its loss was another
    lost = 0
    for name in columns:
        for position, (value, is_response) in enumerate(zip(columns[name], mask, strict=True)):
            if value is not None or not is_response:
                continue
            lost += 1
            columns[name][position] = _stand_in(name, position, assumptions)
    numbers = (integer(data, name) for name in ("step", "rank", "export_sequence_idx"))
    return {
        "id": "-".join(str(number) for number in numbers),
        "prompt_id": prompt_id(tokens, mask),
        "tokens": tokens,
        "response_mask": mask,
        **columns,
        "reward": _reward(data, mask),
        "sample_mask": not (lost and assumptions.nonfinite == "mask"),
        "sampling": sampling_of(assumptions),
    }, lost


def _reward(data: Mapping[str, Any], mask: list[Any]) -> Any:
    """What all response tokens say; None where they say nothing."""
    if data.get("rewards") is None:
        return None
    values = [value for value, entry in zip(listed(data, "rewards", len(mask)), mask, strict=True) if entry]
    if any(value != values[0] for value in values):
        raise FieldError("rewards: must be the same at every response token; correct it or drop the row")
    return values[0] if values else None


def _stand_in(name: str, position: int, assumptions: Assumptions) -> float:
    if assumptions.nonfinite == "mask":
        return 0.0
    if assumptions.nonfinite == "outside" and name in _LOGPROBS:
        return -math.inf
    raise FieldError(
        f"{name}[{position}]: null at a response token, which was NaN or infinite and is lost; use --nonfinite mask to "
        "mask such samples" + (", or outside to take it as -inf" if name in _LOGPROBS else "")
    )
