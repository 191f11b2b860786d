"""Which files a recipe may name: those of its own folder and of the working directory, and of folders it says."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_support.config.path_text import check_path
from megatron_support.config.recipe import Recipe, Weights
from megatron_support.errors import ConfigurationError


def absolute(path: str | Path, folder: Path) -> Path:
    """A path as seen from a folder, without ``..``: what is checked is what is opened."""
    return Path(os.path.normpath(folder / Path(path).expanduser()))


def allowed_folders(recipe: Path, may_read: Sequence[str]) -> tuple[Path, ...]:
    """The folders that a recipe may read from.

    Args:
        recipe: its file.
        may_read: the recipe's own field.
    """
    folder = recipe.resolve().parent
    own = (folder, absolute(recipe.parent, Path.cwd()), Path.cwd())
    return (*own, *(absolute(path, folder) for path in may_read))


def check_allowed(path: Path, folders: Collection[Path], *, field: str, source: Path) -> None:
    """Check that a file lies in a folder that may be read.

    Raises:
        ConfigurationError: it does not.
    """
    if not any(path == folder or folder in path.parents for folder in folders):
        raise ConfigurationError(
            f"{source}: {field}: must lie in the recipe's folder, the working directory or a folder of may_read, got "
            f"{str(path)!r}; name its folder in may_read, or give the path on the command line"
        )


def anchored(recipe: Recipe, source: Path, given: Collection[str]) -> Recipe:
    """The same recipe with absolute paths of rollout files and weights, every one of them allowed.

    ``may_read`` names them too, so that the recipe can be written into a run folder and read from there.

    Args:
        recipe: as validated.
        source: its file; relative paths begin at its folder.
        given: fields that were set on the command line: their relative paths begin at the working directory, and their
            user may read what they name.

    Raises:
        ConfigurationError: a path that the recipe names and may not read, or that is too long from its folder.
    """
    folder = source.resolve().parent
    folders = allowed_folders(source, recipe.may_read or ())
    read = {str(absolute(path, folder)) for path in recipe.may_read or ()}

    def at(path: str, field: str, start: Path = folder) -> str:
        typed = any(_covers(own, field) or _covers(field, own) for own in given)
        result = absolute(path, Path.cwd() if typed else start)
        try:
            check_path(str(result))
        except ValueError as error:
            raise ConfigurationError(f"{source}: {field}: {error}") from None
        if not typed:
            check_allowed(result, folders, field=field, source=source)
        read.add(str(result))
        return str(result)

    def weights(value: Weights, field: str) -> Weights:
        if value.type == "random" or value.path.startswith("package:"):
            return value
        return value.model_copy(update={"path": at(value.path, f"{field}.path")})

    updates: dict[str, object] = {
        "model": recipe.model.model_copy(update={"weights": weights(recipe.model.weights, "model.weights")})
    }
    for name in ("reference", "teacher"):
        part = getattr(recipe, name)
        if part.checkpoint is not None:
            updates[name] = part.model_copy(update={"checkpoint": weights(part.checkpoint, f"{name}.checkpoint")})
    if recipe.rollouts.type == "files":
        paths = [at(path, f"rollouts.paths.{number}") for number, path in enumerate(recipe.rollouts.paths)]
        updates["rollouts"] = recipe.rollouts.model_copy(update={"paths": paths})
    if recipe.checkpoint.resume not in ("auto", "never"):
        at(recipe.checkpoint.resume, "checkpoint.resume", Path.cwd())  # as run folders are: from the working directory
    updates["may_read"] = sorted(read) or None
    return recipe.model_copy(update=updates)


def _covers(outer: str, inner: str) -> bool:
    """Whether a field is another one or lies in it."""
    return inner == outer or inner.startswith(f"{outer}.")
