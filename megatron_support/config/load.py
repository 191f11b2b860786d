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

    Relative paths of rollout files and of weights are taken from the folder of ``path`` and become absolute. A recipe
    may begin with ``defaults: [base.yaml, ...]``: files, relative to it, whose fields it takes over. Later files win
    over earlier ones and the recipe over all; mappings merge field by field, lists are replaced, and a mapping whose
    ``type`` differs replaces the other, because its fields are other fields.

    Args:
        path: a YAML file (safe subset; ``${...}`` interpolation as in omegaconf, ``${oc.env:NAME,default}`` reads the
            environment).
        overrides: ``loss.surrogate.clip_high=0.28``-like assignments, values in YAML syntax. A mapping replaces what
            was there.

    Raises:
        ConfigurationError: unreadable file, bad YAML, files that inherit in a circle, bad override, or every broken
            rule of the schema at once.
    """
    path = Path(path)
    try:
        tree = OmegaConf.create(_inherited(path, ()))
        for override in overrides:
            key, value = _assignment(override)
            OmegaConf.update(tree, key, value, merge=False, force_add=True)
        data = cast("dict[str, Any]", OmegaConf.to_container(tree, resolve=True))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:  # OSError: a bare number
        raise ConfigurationError(f"{path}: not a valid recipe: {error}; fix the YAML") from None
    return _anchored(Recipe.from_dict(data, source=str(path)), path.resolve().parent)


def _inherited(path: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    """A recipe's fields over those of its ``defaults``; interpolations are still unresolved.

    Args:
        path: the file.
        heirs: the files that inherit from it, outermost first.
    """
    resolved = path.resolve()
    if resolved in heirs:
        circle = " -> ".join(file.name for file in (*heirs[heirs.index(resolved) :], resolved))
        raise ConfigurationError(f"{path}: defaults must not lead back to a recipe, got {circle}; take one out")
    tree = _parsed(path, heirs[-1] if heirs else None)
    bases = tree.pop("defaults", [])
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigurationError(f"{path}: defaults: must be a list of recipe files, got {bases!r}; write [base.yaml]")
    result: dict[str, Any] = {}
    for base in bases:
        result = _merge_fields(result, _inherited(path.parent / base, (*heirs, resolved)))
    return _merge_fields(result, tree)


def _parsed(path: Path, heir: Path | None) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        named = "" if heir is None else f", which {heir} names in defaults"
        raise ConfigurationError(
            f"{path}: cannot read the recipe ({error}){named}; give the path of a YAML file"
        ) from None
    try:
        tree = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:  # OSError: a bare number
        raise ConfigurationError(f"{path}: not a valid recipe: {error}; fix the YAML") from None
    if not OmegaConf.is_dict(tree):
        raise ConfigurationError(f"{path}: a recipe is a mapping of fields, got {type(tree).__name__}; see configs/")
    return cast("dict[str, Any]", OmegaConf.to_container(tree, resolve=False))


def _merge_fields(base: Any, over: Any) -> Any:
    if (
        not isinstance(base, dict)
        or not isinstance(over, dict)
        or over.get("type", base.get("type")) != base.get("type")
    ):
        return over
    return base | {name: _merge_fields(base[name], value) if name in base else value for name, value in over.items()}


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
    for name in ("reference", "teacher"):
        part = getattr(recipe, name)
        if part.checkpoint is not None:
            updates[name] = part.model_copy(update={"checkpoint": _at(part.checkpoint, folder)})
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
