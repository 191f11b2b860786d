"""A run folder as plain values. What a run that is still going, or was ended, has not written is None or empty."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.files import read_rollouts
from megatron_support.training.folder import (
    ENVIRONMENT,
    METRICS,
    ROLLOUTS,
    SUMMARY,
    TOKEN_TEXT,
    TOKENS,
    newest_run,
)
from megatron_support.training.saved import RECIPE


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What the report reads."""

    path: Path
    steps: list[dict[str, Any]]
    """Metrics of each step, by name; at least one step."""
    tokens: list[dict[str, Any]]
    """Of :func:`megatron_support.training.token_record.record_tokens`."""
    recipe: dict[str, Any]
    recipe_text: str
    summary: dict[str, Any] | None
    environment: dict[str, Any]
    text: dict[str, str]
    """Text of tokens by id."""
    rollouts: RolloutBatch | None
    """Of the last step, with the columns that it filled."""


def read_run(path: str | Path) -> RunFiles:
    """Read a run folder.

    Args:
        path: the folder, or one that holds run folders: then its newest.

    Raises:
        ConfigurationError: there is no run in it, or a file of it is damaged.
        RolloutError: the last step's rollouts are damaged.
    """
    folder = newest_run(Path(path).expanduser())
    recipe_text = _read(folder / RECIPE) if (folder / RECIPE).exists() else ""
    recipe = _optional(folder / RECIPE, yaml.safe_load) or {}
    rollouts = folder / ROLLOUTS
    return RunFiles(
        path=folder,
        steps=_lines(folder / METRICS),
        tokens=_lines(folder / TOKENS) if (folder / TOKENS).exists() else [],
        recipe=recipe,
        recipe_text=recipe_text,
        summary=_optional(folder / SUMMARY, json.loads),
        environment=_optional(folder / ENVIRONMENT, json.loads) or {},
        text=_optional(folder / TOKEN_TEXT, json.loads) or {},
        rollouts=read_rollouts(rollouts) if rollouts.exists() else None,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one a line. A last line without its end is being written and is left out."""
    text = _read(path)
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    rows = [_parsed(f"{path}:{number}", json.loads, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigurationError(f"{path}: no step has been written yet; wait for the first one")
    return rows


def _optional(path: Path, parse: Callable[[str], Any]) -> Any:
    return _parsed(str(path), parse, _read(path)) if path.exists() else None


def _read(path: Path) -> str:
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would block
        raise ConfigurationError(f"{path}: must be a regular file; give a run folder that can be read")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot read it ({error}); give a run folder that can be read") from None


def _parsed(place: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        value = parse(text)
        if not isinstance(value, dict):
            raise ValueError(f"must be a mapping of fields, got {type(value).__name__}")
        return value
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{place}: damaged ({error}); take it away, or make the run again") from None
