"""Where a run begins: at its start, or at a checkpoint of one that was stopped or killed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_support.config.recipe import Recipe
from megatron_support.errors import ConfigurationError
from megatron_support.training.folder import CHECKPOINTS, ENVIRONMENT, RECIPE, SUMMARY
from megatron_support.training.run_lock import is_locked

STEP = "step_"
# what may differ between a run and its continuation
_FREE = {"logging", "checkpoint", "may_read", "parallel", "device"}

# what differs where nothing is changed about the training
_UNTOLD = {"logging", "checkpoint", "may_read"}
# what the learning rate is made of: Megatron's scheduler takes these from the checkpoint
_SCHEDULED = ("optimizer.lr", "optimizer.min_lr", "optimizer.schedule.", "train.steps")
_LONGEST = 80
"""Characters of a value in a line."""


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
    if not is_checkpoint(path):
        raise ConfigurationError(
            f"checkpoint.resume must be auto, never, a run folder with a checkpoint, or a checkpoint, got {path}; "
            "correct the path"
        )
    return Start(checkpoint=path)


def checkpoints_of(run: Path) -> list[tuple[int, Path]]:
    """Step and folder of the whole checkpoints of a run, oldest first."""
    folders = (run / CHECKPOINTS).glob(f"{STEP}*")
    steps = [(folder.name.removeprefix(STEP), folder) for folder in folders if is_checkpoint(folder)]
    return sorted((int(step), folder) for step, folder in steps if step.isdecimal())


def newest_checkpoint(run: Path) -> Path | None:
    """The last whole checkpoint of a run."""
    found = checkpoints_of(run)
    return found[-1][1] if found else None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint: ``metadata.json`` is the last file that is written."""
    return (folder / "metadata.json").is_file()


def recipe_changes(saved: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """One line for each field in which a checkpoint's recipe is not the present one, and what that leaves as it was.

    Args:
        saved: the checkpoint's, as plain values; fields of another version of this package may be missing.
        recipe: of the run that goes on.
    """
    old = _leaves({name: value for name, value in saved.items() if name not in _UNTOLD})
    new = _leaves(recipe.model_dump(mode="json", exclude=_UNTOLD))
    names = [name for name in dict.fromkeys([*new, *old]) if _shown(old, name, None) != _shown(new, name, None)]
    lines = [f"{name}: {_shown(old, name)} in the checkpoint, {_shown(new, name)} in this recipe" for name in names]
    if any(name.startswith(_SCHEDULED) for name in names):
        lines.append("the learning rate goes on by the checkpoint's schedule, which is part of its optimizer's state")
    return lines


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def _shown(leaves: Mapping[str, Any], name: str, longest: int | None = _LONGEST) -> str:
    if name not in leaves:
        return "not there"
    text = json.dumps(leaves[name], ensure_ascii=False)
    return text if longest is None or len(text) <= longest else f"{text[: longest - 3]}..."


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
    path = run / RECIPE
    try:  # another run's file may hold anything, and must not stop this one
        found = Recipe.from_dict(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except (OSError, yaml.YAMLError, RecursionError, TypeError, ValueError):  # ConfigurationError is a ValueError
        return False
    if found is None:
        return False
    resume = recipe.checkpoint.resume
    if resume != "auto" and found.checkpoint.resume != resume:
        return False
    return found.model_dump(exclude=_FREE) == recipe.model_dump(exclude=_FREE)
