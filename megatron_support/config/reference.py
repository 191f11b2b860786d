"""The reference of every recipe field, generated from the schema: Markdown, and JSON schema for editors."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_support.config.recipe import Recipe

HEAD = """\
# Reference of every recipe field

Written by `megatron-support recipe --reference`. A field without a default is required. Where several types are
possible, the field `type` chooses one, and each has a section of its own. Any field can be set on the command line:
`loss.surrogate.clip_high=0.28`.

Two things stand above the fields. `defaults: [base.yaml, ...]` takes over the fields of other recipes: later files win
over earlier ones, the recipe over all. `${oc.env:NAME,default}` reads an environment variable as text
(`${oc.decode:${oc.env:NAME,5}}` as a number), `${field.sub}` another field.
"""

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >="}


def json_schema() -> str:
    """The JSON schema of a recipe: an editor that knows it completes and checks fields."""
    schema = Recipe.model_json_schema()
    schema["properties"]["defaults"] = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Recipes under it.",
    }
    return json.dumps(schema, indent=2)


def markdown() -> str:
    """The reference as Markdown, a table for each mapping, in the order of the recipe."""
    return "\n".join([HEAD, *_sections(Recipe, "")])


def _sections(model: type[BaseModel], path: str) -> Iterator[str]:
    """The model's table, then those of the models in its fields."""
    tag = _tag(model)
    title = f"`{path}`" if path else "The recipe"
    yield f"## {title}{f' of type `{tag}`' if tag else ''}\n"
    if model.__doc__:
        yield " ".join(inspect.cleandoc(model.__doc__).split()) + "\n"
    rows = [(name, info) for name, info in model.model_fields.items() if not (name == "type" and tag)]
    if rows:
        yield "| field | what it may be | default | |\n|---|---|---|---|"
        for name, info in rows:
            yield f"| `{name}` | {_kind(info)} | {_default(info)} | {_cell(info.description or '')} |"
        yield ""
    for name, info in model.model_fields.items():
        for inner in _models(info.annotation):
            yield from _sections(inner, f"{path}.{name}" if path else name)


def _tag(model: type[BaseModel]) -> str | None:
    info = model.model_fields.get("type")
    values = get_args(info.annotation) if info is not None else ()
    return str(values[0]) if len(values) == 1 else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _kind(info: FieldInfo) -> str:
    models = _models(info.annotation)
    tags = [f"`{tag}`" for model in models if (tag := _tag(model))]
    bounds = [bound for entry in info.metadata for bound in _bounds(entry)]
    text = " or ".join(dict.fromkeys(_names(info.annotation, tags)))
    return text + (f", {', '.join(bounds)}" if bounds else "")


def _names(annotation: Any, tags: list[str]) -> Iterator[str]:
    """Readable names of the alternatives of an annotation."""
    origin = get_origin(annotation)
    if annotation is type(None):
        yield "null"
    elif origin is Annotated:
        inner, *metadata = get_args(annotation)
        bounds = [bound for entry in metadata for bound in _bounds(entry)]
        for name in _names(inner, tags):
            yield name + (f" {', '.join(bounds)}" if bounds else "")
    elif origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _names(argument, tags)
    elif origin is Literal:
        yield from (f"`{value}`" for value in get_args(annotation))
    elif _models(annotation) and origin is None:
        tag = _tag(annotation)
        yield f"`{{type: {tag}}}`" if tag and f"`{tag}`" in tags else "mapping"
    elif origin in (list, dict):
        arguments = [" or ".join(_names(argument, tags)) for argument in get_args(annotation)]
        yield f"list of {arguments[0]}" if origin is list else f"mapping of {arguments[-1]}"
    else:
        yield {str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, str(annotation))


def _bounds(entry: Any) -> list[str]:
    metadata = entry.metadata if isinstance(entry, FieldInfo) else [entry]
    found = [(sign, getattr(part, name, None)) for part in metadata for name, sign in _BOUNDS.items()]
    return [f"{sign} {value}" for sign, value in found if value is not None]


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined
    if isinstance(value, BaseModel):
        tag = _tag(type(value))
        return f"`{tag}`" if tag else "its defaults"
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")
