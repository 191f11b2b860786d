"""YAML -> Recipe: omegaconf reads and interpolates, dotted overrides apply, the schema validates."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_support.config.base import StrictModel
from megatron_support.config.path_text import check_path
from megatron_support.config.paths import absolute, allowed_folders, anchored, check_allowed
from megatron_support.config.recipe import Recipe, TaskCheck
from megatron_support.config.yaml_rules import RuleBroken, check_interpolations, check_yaml, read_text
from megatron_support.errors import ConfigurationError

MAX_FILES = 64
"""Of one recipe with its ``defaults``; each may name others, so a few could come to any number."""

Schema = TypeVar("Schema", bound=StrictModel)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, check_task: TaskCheck | None = None) -> Recipe:
    """Read a recipe.

    Relative paths of rollout files and of weights are taken from the folder of ``path``, those of ``overrides``
    from the working directory, and become absolute. What a recipe names lies in its folder, the working directory
    or a folder of its field ``may_read``. A recipe may begin with ``defaults: [base.yaml, ...]``: files, relative
    to it, whose fields it takes over. Later files win over earlier ones and the recipe over all; mappings merge
    field by field, lists are replaced, and a mapping whose ``type`` differs replaces the other, because its fields
    are other fields.

    Args:
        path: a YAML file (safe subset; ``${...}`` interpolation as in omegaconf, ``${oc.env:NAME,default}`` reads the
            environment).
        overrides: ``loss.surrogate.clip_high=0.28``-like assignments, values in YAML syntax. A mapping replaces what
            was there.
        check_task: which rule a name of a task breaks, e.g. :func:`megatron_support.training.tasks.unknown_task`; None:
            tasks are registered later.

    Raises:
        ConfigurationError: unreadable file, bad YAML, a path that the recipe may not read, files that inherit in a
            circle, bad override, or every broken rule of the schema at once.
    """
    path = Path(path)
    try:
        assignments = [_assignment(override) for override in overrides]
        data = _assigned(_inherited(path, _Reading(path)), assignments)
    except RuleBroken as error:
        raise ConfigurationError(f"{path}: not a valid recipe: {error}") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:  # OSError: a bare number
        raise ConfigurationError(f"{path}: not a valid recipe: {error}; fix the YAML") from None
    recipe = Recipe.from_dict(data, source=str(path), context={"task": check_task})
    return anchored(recipe, path, [key for key, _ in assignments])


def load_fields(schema: type[Schema], overrides: Sequence[str]) -> Schema:
    """A part of a recipe from assignments alone, over its defaults.

    Raises:
        ConfigurationError: a bad assignment, or every broken rule of the schema at once.
    """
    try:
        data = _assigned({}, [_assignment(override) for override in overrides])
    except (RuleBroken, OmegaConfBaseException, RecursionError) as error:
        raise ConfigurationError(f"fields to set: {error}; correct them") from None
    return schema.from_dict(data, source="fields to set")


def _assigned(fields: dict[str, Any], assignments: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Fields with some set anew, and every interpolation resolved."""
    tree = OmegaConf.create(fields)
    for key, value in assignments:
        OmegaConf.update(tree, key, value, merge=False, force_add=True)
    check_interpolations(OmegaConf.to_container(tree, resolve=False))
    return cast("dict[str, Any]", OmegaConf.to_container(tree, resolve=True))


class _Reading:
    """The files of one recipe: which may be read, and which have been."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folders: tuple[Path, ...] | None = None
        self._files = 0

    def begin(self, path: Path, tree: Mapping[str, Any]) -> None:
        """A file has been parsed; the first one says which folders the others may lie in."""
        if self._folders is None:
            named = tree.get("may_read")
            self._folders = allowed_folders(
                path, [name for name in named if isinstance(name, str)] if isinstance(named, list) else ()
            )
        self._files += 1
        if self._files > MAX_FILES:
            raise ConfigurationError(f"{self._path}: defaults must name at most {MAX_FILES} files in all; write fewer")

    def base(self, heir: Path, name: str) -> Path:
        """A file that ``heir`` names in its defaults, where it may be read."""
        assert self._folders is not None
        try:
            path = heir.parent / Path(check_path(name)).expanduser()
            check_path(str(path))
        except ValueError as error:
            raise ConfigurationError(f"{heir}: defaults: {error}") from None
        there = absolute(path, Path.cwd())
        check_allowed(there, (*self._folders, absolute(heir.parent, Path.cwd())), field="defaults", source=heir)
        return path


def _inherited(path: Path, reading: _Reading, heirs: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's fields over those of its ``defaults``; interpolations are still unresolved.

    Args:
        path: the file.
        reading: the files of the recipe so far.
        heirs: the files that inherit from it, outermost first.
    """
    resolved = path.resolve()
    if resolved in heirs:
        circle = " -> ".join(file.name for file in (*heirs[heirs.index(resolved) :], resolved))
        raise ConfigurationError(f"{path}: defaults must not lead back to a recipe, got {circle}; take one out")
    tree = _parsed(path, heirs[-1] if heirs else None)
    reading.begin(path, tree)
    bases = tree.pop("defaults", [])
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigurationError(f"{path}: defaults: must be a list of recipe files, got {bases!r}; write [base.yaml]")
    result: dict[str, Any] = {}
    for base in bases:
        result = _merge_fields(result, _inherited(reading.base(path, base), reading, (*heirs, resolved)))
    return _merge_fields(result, tree)


def _parsed(path: Path, heir: Path | None) -> dict[str, Any]:
    try:
        text = read_text(path)
    except RuleBroken as error:
        raise ConfigurationError(f"{path}: not a valid recipe: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        named = "" if heir is None else f", which {heir} names in defaults"
        raise ConfigurationError(
            f"{path}: cannot read the recipe ({error}){named}; give the path of a YAML file"
        ) from None
    try:
        check_yaml(text)
        tree = OmegaConf.load(io.StringIO(text))
    except RuleBroken as error:
        raise ConfigurationError(f"{path}: not a valid recipe: {error}") from None
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
        check_yaml(text)
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(f"value: {text}")))
    except (RuleBroken, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigurationError(f"override {override!r}: the value is not valid YAML ({error}); correct it") from None
    return key, cast("dict[str, Any]", tree)["value"]
