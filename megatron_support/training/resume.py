"""Where a run begins: at its start, or at a checkpoint of one that was stopped or killed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_support.config.recipe import Recipe
from megatron_support.errors import ConfigurationError
from megatron_support.training.folder import ENVIRONMENT, SUMMARY
from megatron_support.training.run_lock import is_locked
from megatron_support.training.saved import CHECKPOINT, RECIPE, is_checkpoint, newest_checkpoint, recipe_of

# what may differ between a run and its continuation
_FREE = {"logging", "checkpoint", "may_read", "parallel", "device"}


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    run: Path | None = None
    """The run folder that is continued in place; None for a new one."""
    checkpoint: Path | None = None
    """What is loaded first; None for the recipe's own weights."""


def find_start(recipe: Recipe) -> Start:
    """What ``checkpoint.resume`` means on this disk. On the first rank alone.

    Raises:
        ConfigurationError: the path is neither a run with a checkpoint nor a checkpoint, or is of a run that goes on.
    """
    resume = recipe.checkpoint.resume
    if resume == "never":
        return Start()
    if recipe.checkpoint.every is not None and (run := _unfinished(recipe)) is not None:
        return Start(run=run, checkpoint=newest_checkpoint(run))
    if resume == "auto":
        return Start()
    path = Path(resume).expanduser().absolute()
    checkpoint = newest_checkpoint(path)
    if checkpoint is not None:
        if is_locked(path / RECIPE):
            raise ConfigurationError(
                f"checkpoint.resume must be a run that has ended, got {path}, which a process is still writing; "
                "wait for it, or give one of its checkpoints"
            )
        return Start(run=path, checkpoint=checkpoint)
    if is_checkpoint(path / CHECKPOINT):
        raise ConfigurationError(
            f"checkpoint.resume must be a run with a checkpoint to go on from, got {path}, which kept its final "
            "weights alone; train with checkpoint.every, or begin anew from its weights (megatron-support export)"
        )
    if not is_checkpoint(path):
        raise ConfigurationError(
            f"checkpoint.resume must be auto, never, a run folder with a checkpoint, or a checkpoint, got {path}; "
            "correct the path"
        )
    return Start(checkpoint=path)


def _unfinished(recipe: Recipe) -> Path | None:
    """The newest run of the same recipe that has a checkpoint, did not end, and that nobody is writing."""
    parent = Path(recipe.logging.run_dir).expanduser()
    for run in sorted(parent.glob(f"{recipe.name}-*"), reverse=True):
        if ((run / SUMMARY).exists() and not _of_this_launch(run)) or newest_checkpoint(run) is None:
            continue
        if _continues(recipe, run) and not is_locked(run / RECIPE):
            return run
    return None


def launch_id() -> str | None:
    """What the launcher calls this launch, the same after a restart; None where it gives no name of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name == "none" else name


def _of_this_launch(run: Path) -> bool:
    """Whether a restart finds a run that its own launch has finished: a rank was killed on its way out.

    It is done again from its last checkpoint, which leaves nothing to do, instead of a new one from the start.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or launch_id() is None:
        return False
    try:
        return json.loads((run / ENVIRONMENT).read_text(encoding="utf-8")).get("launch") == launch_id()
    except (OSError, ValueError):
        return False


def _continues(recipe: Recipe, run: Path) -> bool:
    found = recipe_of(run)
    if found is None:
        return False
    resume = recipe.checkpoint.resume
    if resume != "auto" and found.checkpoint.resume != resume:
        return False
    return found.model_dump(exclude=_FREE) == recipe.model_dump(exclude=_FREE)
