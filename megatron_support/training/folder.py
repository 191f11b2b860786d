"""The run folder: resolved recipe, metrics as JSON lines and for TensorBoard, last rollouts, summary."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_support.config.recipe import Recipe
from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.files import write_rollouts
from megatron_support.training.files import replace_file, try_writing
from megatron_support.training.run_lock import lock_file
from megatron_support.training.saved import RECIPE
from megatron_support.training.tracking import WandbRun

METRICS, TENSORBOARD, SUMMARY = "metrics.jsonl", "tensorboard", "summary.json"
ROLLOUTS = "rollouts_last_step.jsonl"
STOPPED = "stopped.json"
TOKENS, TOKEN_TEXT, ENVIRONMENT = "tokens.jsonl", "token_text.json", "environment.json"


class RunFolder:
    """``<run_dir>/<name>-<date>-<time>``, made when the first step is written: a run that fails before leaves nothing.

    Args:
        recipe: written as ``recipe.yaml``; it can be run as it is.
        continued: a run folder that is gone on with instead.

    Raises:
        ConfigurationError: ``logging.run_dir`` cannot be made or written.
    """

    def __init__(self, recipe: Recipe, continued: Path | None = None) -> None:
        self._recipe = recipe
        self._lock: Any = None
        self._tensorboard: Any = None
        self._wandb: WandbRun | None = None
        self.environment: Mapping[str, Any] = {}
        """Written as ``environment.json`` when the folder is made."""
        parent = Path(recipe.logging.run_dir).expanduser() if continued is None else continued
        nearest = next(folder for folder in (parent.absolute(), *parent.absolute().parents) if folder.exists())
        if not nearest.is_dir():
            raise ConfigurationError(
                f"logging.run_dir must be a folder, got {parent}: {nearest} is a file; choose another"
            )
        try:
            try_writing(nearest)
        except OSError as error:
            raise ConfigurationError(
                f"logging.run_dir must be a folder that can be written, got {parent} ({error.strerror}); choose another"
            ) from None
        self.path = continued or _unused(parent / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def go_on(self, step: int) -> None:
        """Take up a run that is continued: what it wrote after a step, and that it had ended, is forgotten.

        Args:
            step: actor steps that its checkpoint holds.
        """
        for name in (STOPPED, SUMMARY):
            (self.path / name).unlink(missing_ok=True)
        for name in (METRICS, TOKENS):
            _cut(self.path / name, step)
        self._open(first=step + 1)

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step's metrics."""
        if not self.path.exists():
            self._make()
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **{name: _plain(value) for name, value in values.items()}}) + "\n")
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(step, values)

    def write_tokens(self, record: Mapping[str, Any]) -> None:
        """Append what one step's single tokens say, for the report."""
        with (self.path / TOKENS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def write_token_text(self, text_of: Callable[[int], str], tokens: Iterable[int]) -> None:
        """The text of the tokens that the report shows, so that it can be made where the weights are not."""
        known = {str(token): text for token in sorted(set(tokens)) if (text := text_of(token))}
        (self.path / TOKEN_TEXT).write_text(json.dumps(known, ensure_ascii=False) + "\n", encoding="utf-8")

    def write_rollouts(self, rollouts: RolloutBatch) -> None:
        """The rollouts of the last step, with the log-probabilities and advantages that it used."""
        write_rollouts(self.path / ROLLOUTS, rollouts)

    def write_fault(self, step: int, rollouts: RolloutBatch) -> None:
        """The samples at fault in one step; ``megatron-support replay`` reads them."""
        if not self.path.exists():
            self._make()
        write_rollouts(self.fault_path(step), rollouts)

    def fault_path(self, step: int) -> Path:
        """Where :meth:`write_fault` writes."""
        return self.path / f"fault_step_{step}.jsonl"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        replace_file(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    def write_stopped(self, signal: str, step: int) -> None:
        """That the run has ended before its last step, and can be continued."""
        if self.path.exists():
            replace_file(self.path / STOPPED, json.dumps({"signal": signal, "step": step}) + "\n")

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()
        if self._lock is not None:
            self._lock.close()

    def _make(self) -> None:
        self.path.mkdir(parents=True)
        self._open(first=1)

    def _open(self, first: int) -> None:
        """``first``: the step that is written next."""
        tree = self._recipe.model_dump(mode="json")
        replace_file(self.path / RECIPE, yaml.safe_dump(tree, sort_keys=False))
        self._lock = lock_file(self.path / RECIPE)
        (self.path / ENVIRONMENT).write_text(json.dumps(self.environment, indent=2) + "\n", encoding="utf-8")
        if self._recipe.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.path / TENSORBOARD), purge_step=first if first > 1 else None)
        if self._recipe.logging.wandb is not None:
            self._wandb = WandbRun(self._recipe, self.path)


def newest_run(path: Path) -> Path:
    """``path`` where it is a run folder, else the newest run in it.

    Raises:
        ConfigurationError: there is none.
    """
    if (path / METRICS).is_file():
        return path
    runs = sorted(path.glob(f"*/{METRICS}"), key=lambda file: file.stat().st_mtime) if path.is_dir() else []
    if not runs:
        raise ConfigurationError(
            f"{path}: not a run folder, it has no {METRICS}; give the folder that training named in its last lines"
        )
    return runs[-1].parent


def ended_since(recipe: Recipe, since: float) -> bool:
    """Whether a run of this name has ended, at its last step or by a signal, with everything saved.

    Args:
        recipe: of the run.
        since: seconds since the epoch.
    """
    runs = Path(recipe.logging.run_dir).expanduser().glob(f"{recipe.name}-*")
    marks = [run / name for run in runs for name in (STOPPED, SUMMARY)]
    return any(mark.exists() and mark.stat().st_mtime >= since for mark in marks)


def _cut(path: Path, step: int) -> None:
    """Keep the lines up to a step of a file with one JSON object a line; a line that was cut off by a kill goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # no UTF-8, no JSON, no object, no step
            text = line.decode("utf-8")
            if text.endswith("\n") and json.loads(text)["step"] <= step:
                kept.append(text)
    replace_file(path, "".join(kept))


def _unused(path: Path) -> Path:
    """The path itself, or with -2, -3, ... behind it."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def _plain(value: float) -> float | str:
    """JSON has no infinities."""
    return value if math.isfinite(value) else str(value)
