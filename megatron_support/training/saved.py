"""The recipe and the checkpoints of a run on the disk.

Imports nothing slow, so that a command without one to read ends at once.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from megatron_support.config.recipe import Recipe
from megatron_support.errors import ConfigurationError

RECIPE = "recipe.yaml"
CHECKPOINT, CHECKPOINTS, STEP = "checkpoint", "checkpoints", "step_"
"""In a run folder: the final weights, and the folder of ``step_<n>``."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names.

    Raises:
        ConfigurationError: there is none.
    """
    found = path if is_checkpoint(path) else newest_checkpoint(path)
    if found is None and is_checkpoint(path / CHECKPOINT):
        found = path / CHECKPOINT
    if found is None:
        raise ConfigurationError(
            f"{path}: must be a checkpoint, or a run folder with one; train with checkpoint.every or train.save_final"
        )
    return found


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


def run_of(checkpoint: Path) -> Path:
    """The folder that is the run of a checkpoint, if any is."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent


def recipe_of(run: Path) -> Recipe | None:
    """What a run was started with; None where its folder does not tell."""
    path = run / RECIPE
    try:  # another run's file may hold anything, and must not stop this one
        return Recipe.from_dict(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except (OSError, yaml.YAMLError, RecursionError, TypeError, ValueError):  # ConfigurationError is a ValueError
        return None
