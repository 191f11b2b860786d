"""Megatron-LM: the durable rollout bank, a folder with ``MANIFEST.json`` (format_version 2).

The manifest names a generation and its segments. A line of a segment's ``ledger.log`` is a group of rollouts; its token
ids (int32), log-probabilities (fp16, of generated tokens alone) and generation masks (uint8) lie in ``tokens.bin``,
``logprobs.bin`` and ``masks.bin`` at (offset, bytes), with lengths by [member][turn], and a blake2b checksum covers
record and slices. The last turn of a member holds the whole conversation; where turns are no prefixes of each other,
each is a row of its own, as in training. Sampling parameters are not in the bank.

Read from NVIDIA/Megatron-LM d98e8a64ddf34856e74b24714e3bedb2f5a39553: megatron/rl/rollout_bank.py,
megatron/rl/types/rollout.py, megatron/rl/rl_utils.py (prepare_trajectories).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_support.errors import RolloutError
from megatron_support.rollouts.fields import FieldError, at_place, listed, required, short
from megatron_support.rollouts.readers.common import (
    Assumptions,
    Reading,
    integer,
    json_lines,
    mapping,
    sampling_of,
)

FORMAT_VERSION = 2
MANIFEST = "MANIFEST.json"

_GENERATION = re.compile(r"generation-[0-9a-f]+")
_SEGMENT = re.compile(r"gen-\d+")


@dataclass(frozen=True)
class _Slices:
    """One kind of per-token array."""

    key: str
    file: str
    dtype: Any


_TOKENS = _Slices("tok", "tokens.bin", np.dtype("<i4"))
_LOGPROBS = _Slices("lp", "logprobs.bin", np.dtype("<f2"))
_MASKS = _Slices("mask", "masks.bin", np.dtype("u1"))


def looks_like(path: Path) -> bool:
    """Whether a path is a bank."""
    return path.is_dir() and (path / MANIFEST).exists()


def read(path: Path, assumptions: Assumptions) -> Reading:
    """Read a bank: every group of its active generation, consumed or not."""
    reading = Reading(
        rows=iter(()),
        names={"tokens": "trajectory", "response_mask": "generation_mask", "generation_logprobs": "logprobs"},
        notes=[
            "generation_logprobs: stored in fp16, a relative error of up to 2^-11 (0.004 at -8), which enters every "
            "importance weight; -inf may also be a value below -65504",
        ],
    )
    reading.rows = _rows(path, assumptions, reading)
    return reading


def _rows(path: Path, assumptions: Assumptions, reading: Reading) -> Iterator[tuple[str, Any]]:
    failed = 0
    for segment in _segments(path):
        claimed: Counter[str] = Counter()
        for place, record in json_lines(segment / "ledger.log"):
            for number, member in enumerate(at_place(place, partial(_members, segment, record, claimed))):
                rows = at_place(place, partial(_member_rows, record, number, member, assumptions), reading.names)
                failed += not rows
                yield from ((place, row) for row in rows)
    if failed:
        reading.notes.append(f"{failed} rollouts without a trajectory (failed episodes) are left out")


def _segments(path: Path) -> list[Path]:
    manifest = path / MANIFEST
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RolloutError(f"{manifest}: cannot read it ({error}); give the folder of a rollout bank") from None

    def folders() -> list[Path]:
        data = mapping(content)
        _check_version(data)
        generation = required(data, "active_generation", (str,), "a string")
        names = listed(data, "segments", None)
        for name, value, rule in [("active_generation", generation, _GENERATION)] + [
            (f"segments[{position}]", value, _SEGMENT) for position, value in enumerate(names)
        ]:
            if not isinstance(value, str) or rule.fullmatch(value) is None:  # also: no path outside the bank
                raise FieldError(f"{name}: must be a name like {rule.pattern}, got {short(value)}; correct it")
        return [path / "generations" / generation / name for name in names]

    return at_place(str(manifest), folders)


def _check_version(data: Mapping[str, Any]) -> None:
    version = integer(data, "format_version")
    if version != FORMAT_VERSION:
        raise FieldError(f"format_version: must be {FORMAT_VERSION}, got {version}; convert it with what wrote it")


def _members(segment: Path, record: Any, claimed: Counter[str]) -> list[dict[str, Any]]:
    """The rollouts of a ledger record, with their arrays put back.

    Args:
        segment: its folder.
        record: a line of the ledger.
        claimed: bytes of each file that records have claimed so far; this one's are added.
    """
    record = mapping(record)
    _check_version(record)
    kind = required(record, "kind", (str,), "a string")
    if kind != "token":
        raise FieldError(f"kind: must be 'token', got {short(kind)}; text without token ids cannot be trained on")
    rollouts = listed(required(record, "group", (Mapping,), "an object"), "rollouts", None, "group.")
    slices = {kind.key: _slice(segment, record, kind, claimed) for kind in (_TOKENS, _LOGPROBS, _MASKS)}
    digest = hashlib.blake2b(digest_size=16)
    unsigned = {key: value for key, value in record.items() if key != "checksum"}
    digest.update(json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode())
    for content in slices.values():
        digest.update(content)
    if digest.hexdigest() != record.get("checksum"):
        raise FieldError("checksum: does not fit the record and its slices, they are damaged; remove the line")
    turns = {
        kind.key: _turns(record, kind, slices[kind.key], len(rollouts))
        for kind in (_TOKENS, _LOGPROBS, _MASKS)
        if kind.key in record
    }
    for key in ("tok", "lp", "mask"):
        if key not in turns:
            raise FieldError(f"{key}: required and missing; use an engine that returns tokens and log-probabilities")
    return [
        {**mapping(rollout), "trajectory": tok, "logprobs": lp, "generation_mask": mask}
        for rollout, tok, lp, mask in zip(rollouts, turns["tok"], turns["lp"], turns["mask"], strict=True)
    ]


def _slice(segment: Path, record: Mapping[str, Any], kind: _Slices, claimed: Counter[str]) -> bytes:
    if kind.key not in record:
        return b""
    place = required(record, kind.key, (Mapping,), "an object")
    file = segment / kind.file
    try:
        size = file.stat().st_size if file.exists() else 0
        offset, count = (_claim(place, name, kind, size) for name in ("offset", "bytes"))
        if offset + count > size:
            raise FieldError(
                f"{kind.key}: bytes {offset} to {offset + count} are claimed of {kind.file}, which has {size}; "
                "the file is cut off: remove the line"
            )
        claimed[kind.key] += count
        if claimed[kind.key] > size:
            raise FieldError(
                f"{kind.key}: records claim {claimed[kind.key]} bytes of {kind.file} up to here, which has {size}; no "
                "two may share bytes: remove the line"
            )
        if count == 0:
            return b""
        with file.open("rb") as stream:
            stream.seek(offset)
            return stream.read(count)
    except OSError as error:
        raise FieldError(f"{kind.key}: cannot read {kind.file} ({error}); give a readable bank") from None


def _claim(place: Mapping[str, Any], name: str, kind: _Slices, size: int) -> int:
    value = required(place, name, (int,), "an integer", f"{kind.key}.")
    if not 0 <= value <= size:
        raise FieldError(
            f"{kind.key}.{name}: must be in [0, {size}], the size of {kind.file}, got {short(value)}; remove the line"
        )
    return value


def _turns(record: Mapping[str, Any], kind: _Slices, content: bytes, members: int) -> list[list[list[Any]]]:
    """[member][turn][token] of a flat slice."""
    lengths = listed(record[kind.key], "lengths", members, f"{kind.key}.")
    total = 0
    for member, turns in enumerate(lengths):
        if not isinstance(turns, list) or any(type(n) is not int or n < 0 for n in turns):
            raise FieldError(f"{kind.key}.lengths[{member}]: must be a list of integers >= 0, got {short(turns)}")
        total += sum(turns)
    if total * kind.dtype.itemsize != len(content):
        raise FieldError(
            f"{kind.key}.lengths: must add up to {len(content) // kind.dtype.itemsize} entries, got {short(total)}; "
            "remove the line"
        )
    flat, position, result = np.frombuffer(content, kind.dtype).tolist(), 0, []
    for turns in lengths:
        ends = list(itertools.accumulate(turns, initial=position))
        result.append([flat[start:end] for start, end in itertools.pairwise(ends)])
        position = ends[-1]
    return result


def _member_rows(
    record: Mapping[str, Any], number: int, member: Mapping[str, Any], assumptions: Assumptions
) -> list[dict[str, Any]]:
    """One row; or a row for each turn, where the last turn does not hold the others; or none without a trajectory."""
    group = required(record, "uid", (str,), "a string")
    turns, masks, logprobs = member["trajectory"], member["generation_mask"], member["logprobs"]
    if not len(turns) == len(masks) == len(logprobs) or any(
        len(turn) != len(mask) for turn, mask in zip(turns, masks, strict=True)
    ):
        raise FieldError("mask.lengths: must be those of tok, and lp must have as many turns; remove the line")
    reward = member.get("reward")
    if isinstance(reward, list) and len(reward) == 1:
        reward = reward[0]
    shared = {"prompt_id": group, "reward": reward, "sampling": sampling_of(assumptions)}
    if not turns:
        return []
    name = f"{group}/{number}"
    if all(turns[-1][: len(turn)] == turn for turn in turns):
        mask = [0] * len(turns[-1])
        for turn_mask in masks:
            for position, entry in enumerate(turn_mask):
                mask[position] |= entry
        joined = [value for turn in logprobs for value in turn]
        return [{"id": name, **shared, **_columns(turns[-1], mask, joined)}]
    rows = zip(turns, masks, logprobs, strict=True)
    return [{"id": f"{name}/{turn}", **shared, **_columns(*columns)} for turn, columns in enumerate(rows)]


def _columns(tokens: list[int], mask: list[int], logprobs: list[float]) -> dict[str, list[Any]]:
    generated = [position for position, entry in enumerate(mask) if entry]
    if len(logprobs) != len(generated):
        raise FieldError(f"logprobs: must have {len(generated)} entries, got {len(logprobs)}; one a generated token")
    full = [0.0] * len(tokens)
    for position, value in zip(generated, logprobs, strict=True):
        full[position] = value
    return {"tokens": tokens, "response_mask": mask, "generation_logprobs": full}
