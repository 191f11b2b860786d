"""The base of every configuration type, and error messages that name field, value, rule and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import Self

from megatron_support.errors import ConfigurationError


class StrictModel(BaseModel):
    """Frozen, no unknown fields, no silent conversion (an int is accepted for a float; nothing else is converted)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, source: str | None = None, context: Mapping[str, Any] | None = None
    ) -> Self:
        """Validate ``data`` and report all errors at once.

        Args:
            data: nested mapping of plain values.
            source: where it came from (a file name), put in front of the message.
            context: what validators may ask that the schema does not know.

        Raises:
            ConfigurationError: one line per error, each naming field, value, rule and remedy.
        """
        try:
            return cls.model_validate(dict(data), context=context)
        except ValidationError as error:
            lines = [line for details in error.errors() for line in describe_errors(details, cls)]
            head = f"{source or cls.__name__}: {len(lines)} error{'s' if len(lines) > 1 else ''}"
            raise ConfigurationError("\n".join([head, *(f"  {line}" for line in lines)])) from None


class RuleErrors(ValueError):
    """Several broken rules between the fields of one model: (field, message) each, all reported."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field}: {message}" for field, message in problems))
        self.problems = tuple(problems)


def describe_errors(details: ErrorDetails, root: type[BaseModel]) -> list[str]:
    """One line for each broken rule in one pydantic error."""
    error = details.get("ctx", {}).get("error")
    if not isinstance(error, RuleErrors):
        return [describe_error(details, root)]
    parent = _without_tags(list(details["loc"]), root)
    return [f"{'.'.join([*map(str, parent), field])}: {message}" for field, message in error.problems]


def describe_error(details: ErrorDetails, root: type[BaseModel]) -> str:
    """One line for one pydantic error: ``field: rule, got value; remedy``."""
    path = list(details["loc"])
    kind, context, value = details["type"], details.get("ctx", {}), details.get("input")
    name = ".".join(str(part) for part in _without_tags(path, root))
    if kind == "extra_forbidden":
        model = _model_at(root, path[:-1])
        fields = list(model.model_fields)
        close = closest(str(path[-1]), fields)
        close = close or [name.removesuffix(str(path[-1])) + place for place in _places(str(path[-1]), model)]
        remedy = f"did you mean '{close[0]}'?" if len(close) == 1 else f"use one of: {', '.join(fields)}"
        return f"{name}: unknown field; {remedy}"
    if kind == "missing":
        return f"{name}: required and missing; add it"
    if kind == "union_tag_invalid":
        tag = str(context.get("tag"))
        choices = [c.strip().strip("'") for c in str(context.get("expected_tags", "")).split(",")]
        return f"{name}.type: unknown type, got {tag!r}; {choice_meant(tag, choices)}"
    if kind == "union_tag_not_found":
        return f"{name}: a mapping with a field 'type' is required, got {value!r}; add 'type: ...'"
    if kind == "literal_error":
        return f"{name}: must be one of {context.get('expected')}, got {value!r}; use one of them"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{name}: must be a mapping of fields, got {value!r}; write its fields below it"
    if kind == "value_error":
        message = str(context.get("error", details["msg"]))
        return f"{name}: {message}" if name else message
    if kind == "list_type":
        return f"{name}: must be a list, got {value!r}; write it as [a, b]"
    rule = details["msg"].removeprefix("Input should be ").removeprefix("Input ")
    return f"{name}: must be {rule}, got {value!r}; change it to fit"


def closest(word: str, choices: Collection[str]) -> list[str]:
    """The one choice that was probably meant: that begins with the word, or else is most like it. Empty for none."""
    longer = [choice for choice in choices if choice.startswith(word)]
    return longer if word and len(longer) == 1 else difflib.get_close_matches(word, choices, n=1)


def choice_meant(word: str, choices: Collection[str]) -> str:
    """The remedy for an unknown word: the choice that was probably meant, or else all of them."""
    close = closest(word, choices)
    return f"did you mean '{close[0]}'?" if close else f"use one of: {', '.join(choices)}"


def _places(name: str, model: type[BaseModel], parent: str = "") -> list[str]:
    """Dotted paths of every field of that name: where one was meant that is written without its parents."""
    found = [parent + name] if name in model.model_fields else []
    for field, info in model.model_fields.items():
        for inner in _models_in(info.annotation):
            found += _places(name, inner, f"{parent}{field}.")
    return list(dict.fromkeys(found))


def _model_at(root: type[BaseModel], path: list[int | str]) -> type[BaseModel]:
    """The model type that ``path`` (with union tags in it) leads to, or ``root`` where it cannot be followed."""
    model = root
    candidates: list[type[BaseModel]] = [root]
    for part in path:
        fields = [m.model_fields[str(part)] for m in candidates if str(part) in m.model_fields]
        if fields:
            candidates = _models_in(fields[0].annotation)
            continue
        candidates = [m for m in candidates if _tag_of(m) == part] or candidates
    if candidates:
        model = candidates[0]
    return model


def _without_tags(path: list[int | str], root: type[BaseModel]) -> list[int | str]:
    """``path`` as the user wrote it: pydantic inserts the tag of a discriminated union as a step of its own."""
    result: list[int | str] = []
    candidates: list[type[BaseModel]] = [root]
    for part in path:
        fields = [m.model_fields[str(part)] for m in candidates if str(part) in m.model_fields]
        if not fields and len(candidates) > 0 and any(_tag_of(m) == part for m in candidates) and result:
            candidates = [m for m in candidates if _tag_of(m) == part]
            continue
        result.append(part)
        candidates = _models_in(fields[0].annotation) if fields else candidates
    return result


def _tag_of(model: type[BaseModel]) -> Any:
    if "union_tag" in vars(model):  # the model stands for several values of ``type``
        return vars(model)["union_tag"]
    field = model.model_fields.get("type")
    tags = get_args(field.annotation) if field is not None else ()
    return tags[0] if len(tags) == 1 else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Every model type inside an annotation (unions, Annotated, lists)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
