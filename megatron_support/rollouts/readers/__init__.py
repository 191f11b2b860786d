"""Dumps of other programs, read into a RolloutBatch: one module a format, found by content or named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_support.errors import RolloutError
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.raw_rows import check_file, json_rows, parquet_rows
from megatron_support.rollouts.readers import megatron_bank, nemo_rl, prime_rl, skyrl, slime, torch_file
from megatron_support.rollouts.readers.common import Assumptions, NonFinite, Reading
from megatron_support.rollouts.validation import batch_of_rows

__all__ = ["FORMATS", "Assumptions", "Dump", "NonFinite", "read_dump"]

FORMATS = {
    "jsonl": "rollouts of this package, one JSON object a line",
    "parquet": "rollouts of this package",
    "nemo_rl": "NeMo-RL: train_data_step*.jsonl",
    "slime": "slime: --save-debug-rollout-data and --save-debug-train-data, .pt",
    "prime_rl": "prime-rl: token_exports/step_*/rank_*.jsonl, or the folder of a step",
    "megatron_bank": "Megatron-LM: the folder of a rollout bank",
    "skyrl": "SkyRL: a batch saved as plain tensors, .pt (its pickles are refused)",
}
"""Formats by name."""

_OWN = ("jsonl", "parquet")


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A file that was read."""

    rollouts: RolloutBatch
    format: str
    """One of :data:`FORMATS`."""
    notes: tuple[str, ...]
    """What the file does not say, what it has lost, what was assumed and what was left out."""


def read_dump(
    path: str | Path,
    *,
    format: str | None = None,
    assumptions: Assumptions | None = None,
    vocab_size: int | None = None,
) -> Dump:
    """Read rollouts that this or another program wrote.

    Nothing in a file is executed, and nothing is allocated because a file claims a size.

    Args:
        path: a file, or a folder of the formats that are folders.
        format: one of :data:`FORMATS`; None to tell it from the content.
        assumptions: what the file does not say.
        vocab_size: token ids at or above it are refused; None for no bound.

    Raises:
        RolloutError: naming file, line (row, sample), field, value and remedy.
    """
    path, assumptions = Path(path), assumptions or Assumptions()
    if format is not None and format not in FORMATS:
        raise RolloutError(f"format must be one of {', '.join(FORMATS)}, got {format!r}; use one of them")
    if not path.exists():
        raise RolloutError(f"{path}: no such file or folder; give the path of a rollout file or of a dump")
    if not os.access(path, os.R_OK):
        raise RolloutError(f"{path}: cannot read it (permission denied); give a readable file")
    check_file(path)
    content = _torch_content(path, format)
    name = format or _detect(path, content)
    reading = _reading(name, path, content, assumptions)
    left_out: list[str] = []
    rows = reading.rows if name in _OWN else _trained(reading.rows, left_out)
    rollouts = batch_of_rows(path, rows, vocab_size=vocab_size, names=reading.names)
    notes, unknown = list(reading.notes), rollouts.unknown_fields | reading.unknown
    if name in _OWN:
        notes += [f"{field}: unknown, as the file says of itself" for field in sorted(unknown)]
    elif assumptions.sampling is None:
        unknown |= {"sampling"}
        notes.append(
            "sampling: not in the file; temperature 1 without top-k and top-p stands for it (give it with "
            "--temperature, --top-k, --top-p, or rollouts.sampling in a recipe)"
        )
    if left_out:
        notes.append(f"{len(left_out)} rows without a response token are left out, the first is {left_out[0]}")
    return Dump(rollouts=rollouts.with_columns(unknown_fields=unknown), format=name, notes=tuple(notes))


def _torch_content(path: Path, format: str | None) -> Any:
    """What a ``.pt`` file holds; None for the formats that are none. A pickle is refused."""
    if path.is_dir():
        return None
    if path.suffix in (".pkl", ".pickle") or torch_file.is_pickle(path):
        skyrl.refuse(path)
    torch_format = format in ("slime", "skyrl") or (format is None and path.suffix in (".pt", ".pth"))
    return torch_file.load(path) if torch_format else None


def _detect(path: Path, content: Any) -> str:
    if megatron_bank.looks_like(path):
        return "megatron_bank"
    if path.is_dir() and prime_rl.files_of(path):
        return "prime_rl"
    if content is not None:
        for name, module in (("slime", slime), ("skyrl", skyrl)):
            if module.looks_like(content):
                return name
    elif path.suffix == ".parquet":
        return "parquet"
    elif path.suffix == ".jsonl":
        _, first = next(json_rows(path), ("", None))
        if isinstance(first, dict):
            for name, reader in (("nemo_rl", nemo_rl), ("prime_rl", prime_rl)):
                if reader.looks_like(first):
                    return name
        return "jsonl"
    raise RolloutError(f"{path}: of no known format; name it with --from, one of {', '.join(FORMATS)}")


def _reading(name: str, path: Path, content: Any, assumptions: Assumptions) -> Reading:
    if name in _OWN:
        return Reading(rows=_with_sampling((json_rows if name == "jsonl" else parquet_rows)(path), assumptions))
    if name in ("slime", "skyrl"):
        reader = slime if name == "slime" else skyrl
        if not reader.looks_like(content):
            raise RolloutError(f"{path}: not of format {name}; leave --from out, or name another")
        return reader.read(path, content, assumptions)
    readers = {"nemo_rl": nemo_rl.read, "prime_rl": prime_rl.read, "megatron_bank": megatron_bank.read}
    return readers[name](path, assumptions)


def _with_sampling(rows: Iterator[tuple[str, Any]], assumptions: Assumptions) -> Iterator[tuple[str, Any]]:
    """Rows of this package's schema, with the sampling that is given for those whose own is unknown."""
    for place, row in rows:
        if assumptions.sampling is None or not isinstance(row, dict):
            yield place, row
            continue
        unknown = row.get("unknown_fields")
        if not isinstance(unknown, list) or "sampling" not in unknown:
            raise RolloutError(f"{place}: sampling: the row has its own; give none for it")
        rest = [name for name in unknown if name != "sampling"]
        yield place, {**row, "sampling": assumptions.sampling, "unknown_fields": rest}


def _trained(rows: Iterator[tuple[str, Any]], left_out: list[str]) -> Iterator[tuple[str, Any]]:
    """The rows that have a response token; the places of the others are kept."""
    for place, row in rows:
        mask = row.get("response_mask") if isinstance(row, dict) else None
        if isinstance(mask, list) and mask and all(entry in (0, False) and entry is not None for entry in mask):
            left_out.append(place)
        else:
            yield place, row
