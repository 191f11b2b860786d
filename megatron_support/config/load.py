"""YAML -> Recipe: omegaconf reads and interpolates, dotted overrides apply, the schema validates."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_support.config.recipe import Recipe, Weights
from megatron_support.errors import ConfigurationError


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Relative paths of rollout files and of weights are taken from the recipe's folder and become absolute.

    Args:
        path: a YAML file (safe subset; ``${...}`` interpolation as in omegaconf).
        overrides: ``loss.surrogate.clip_high=0.28``-like assignments, values in YAML syntax. A mapping replaces what
            was there.

    Raises:
        ConfigurationError: unreadable file, bad YAML, bad override, or every broken rule of the schema at once.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot read the recipe ({error}); give the path of a YAML file") from None
    try:
        tree = OmegaConf.load(io.StringIO(text))
        if not OmegaConf.is_dict(tree):
            raise ConfigurationError(
                f"{path}: a recipe is a mapping of fields, got {type(tree).__name__}; see configs/"
            )
        for override in overrides:
            key, value = _assignment(override)
            OmegaConf.update(tree, key, value, merge=False, force_add=True)
        data = cast("dict[str, Any]", OmegaConf.to_container(tree, resolve=True))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:  # OSError: a bare number
        raise ConfigurationError(f"{path}: not a valid recipe: {error}; fix the YAML") from None
    return _anchored(Recipe.from_dict(data, source=str(path)), path.resolve().parent)


def _assignment(override: str) -> tuple[str, Any]:
    """Field and value of an override; the value is read as one in a recipe is (1e-3 is a number in both)."""
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        remedy = "name each field" if separator else "add '='"
        raise ConfigurationError(f"override {override!r} must look like field.subfield=value; {remedy}")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(f"value: {text}")))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigurationError(f"override {override!r}: the value is not valid YAML ({error}); correct it") from None
    return key, cast("dict[str, Any]", tree)["value"]


def _anchored(recipe: Recipe, folder: Path) -> Recipe:
    """The same recipe with absolute paths of rollout files and weights."""
    updates: dict[str, object] = {
        "model": recipe.model.model_copy(update={"weights": _at(recipe.model.weights, folder)})
    }
    if recipe.reference.checkpoint is not None:
        checkpoint = _at(recipe.reference.checkpoint, folder)
        updates["reference"] = recipe.reference.model_copy(update={"checkpoint": checkpoint})
    if recipe.rollouts.type == "files":
        paths = [_absolute(path, folder) for path in recipe.rollouts.paths]
        updates["rollouts"] = recipe.rollouts.model_copy(update={"paths": paths})
    return recipe.model_copy(update=updates)


def _at(weights: Weights, folder: Path) -> Weights:
    if weights.type == "random" or weights.path.startswith("package:"):
        return weights
    return weights.model_copy(update={"path": _absolute(weights.path, folder)})


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())
