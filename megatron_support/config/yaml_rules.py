"""What a recipe's YAML may be, so that reading it runs nothing and takes neither memory nor time: checked on its text.

A recipe is some kilobytes of plain mappings. Aliases and interpolations are copies, which a few lines can multiply to
any size; tags build objects; integers of thousands of digits cannot even be printed in a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 2**18
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Values of one file, copies through aliases counted."""
MAX_PLAIN = 1000
"""Characters of a value without quotes; longer numbers cannot be meant."""
MAX_INTERPOLATIONS = 200
MAX_INTERPOLATED = 2**20
"""Characters and values that all interpolations together may become."""

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_REFERENCE = re.compile(r"(\.*)([\w-]+(?:\.[\w-]+)*)")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")
_DECODED = re.compile(r"\$\{oc\.decode:\s*\0\s*\}")


class RuleBroken(ValueError):
    """The message names line or field, rule, value and remedy; the caller adds the file."""


def read_text(path: Path) -> str:
    """The text of a recipe.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        RuleBroken: it is too large for a recipe, or no file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise RuleBroken("must be a regular file; write what it gives into one")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise RuleBroken(f"must have at most {MAX_BYTES} bytes, got more; this is no recipe")
    return content.decode("utf-8")


def check_yaml(text: str) -> None:
    """Check a YAML text before anything is built from it.

    Raises:
        RuleBroken: it is too deep, too large with its aliases, holds a tag, or a number too long.
        yaml.YAMLError: it is no YAML.
    """
    open_nodes: list[tuple[str | None, int]] = []  # (anchor, nodes before it) of each collection around
    sizes: dict[str, int] = {}
    nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = f"line {event.start_mark.line + 1}: "
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise RuleBroken(f"{line}alias *{event.anchor} must not stand inside what it names; write it out")
            nodes += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        elif isinstance(event, yaml.NodeEvent):
            if event.tag is not None:
                raise RuleBroken(f"{line}tags are not read, got {_short(event.tag)}; write the plain value")
            nodes += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, nodes - 1))
            elif isinstance(event, yaml.ScalarEvent):
                if event.anchor is not None:
                    sizes[event.anchor] = 1
                if event.style is None and len(event.value) > MAX_PLAIN:
                    raise RuleBroken(
                        f"{line}a value without quotes must have at most {MAX_PLAIN} characters, got "
                        f"{len(event.value)}; put a text in quotes"
                    )
        if len(open_nodes) > MAX_DEPTH:
            raise RuleBroken(f"{line}must nest at most {MAX_DEPTH} deep, got more; write it flatter")
        if nodes > MAX_NODES:
            raise RuleBroken(f"{line}must hold at most {MAX_NODES} values with what aliases copy, got more; cut it")


def check_interpolations(tree: Any) -> None:
    """Check that interpolations stay small, and read nothing but fields and the environment.

    Args:
        tree: plain mappings and lists with interpolations unresolved.

    Raises:
        RuleBroken: naming the field.
    """
    values = dict(_walk(tree, ()))
    found = {path: value for path, value in values.items() if isinstance(value, str) and "${" in value}
    count = sum(value.count("${") for value in found.values())
    if count > MAX_INTERPOLATIONS or any(len(value) > 2 * MAX_PLAIN for value in found.values()):
        raise RuleBroken(
            f"must hold at most {MAX_INTERPOLATIONS} interpolations, in texts of at most {2 * MAX_PLAIN} characters, "
            f"got {count}; write values out"
        )
    sizes: dict[tuple[str, ...], int] = {}
    if sum(_size(path, values, sizes, ()) for path in found) > MAX_INTERPOLATED:
        raise RuleBroken(f"interpolations must become at most {MAX_INTERPOLATED} characters, got more; cut them")


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, tree
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in children:
        yield from _walk(value, (*path, str(name)))


def _size(
    path: tuple[str, ...],
    values: dict[tuple[str, ...], Any],
    sizes: dict[tuple[str, ...], int],
    around: tuple[tuple[str, ...], ...],
) -> int:
    """Characters of a value, and one for each value of a collection, with interpolations put in."""
    if path in sizes:
        return sizes[path]
    if path in around or len(around) > 4 * MAX_DEPTH:
        raise RuleBroken(f"{'.'.join(path)}: interpolations must not lead back to their own field; write the value")
    value, inside = values.get(path), (*around, path)
    if isinstance(value, dict | list):
        names = [str(name) for name in (value if isinstance(value, dict) else range(len(value)))]
        size = 1 + sum(_size((*path, name), values, sizes, inside) for name in names)
    elif isinstance(value, str):
        size = 1 + len(value) + sum(_size(other, values, sizes, inside) for other in _references(path, value))
    else:
        size = 1
    sizes[path] = min(size, MAX_INTERPOLATED + 1)  # beyond it the number itself would grow without bound
    return sizes[path]


def _references(path: tuple[str, ...], text: str) -> Iterator[tuple[str, ...]]:
    """The fields that a text's interpolations name."""
    text = _DECODED.sub("", _ENVIRONMENT.sub("\0", text))
    inner = _INTERPOLATION.findall(text)
    if len(inner) != text.count("${"):
        raise RuleBroken(f"{'.'.join(path)}: interpolations must not be nested or left open; write them one by one")
    for name in inner:
        match = _REFERENCE.fullmatch(name)
        if match is None:
            raise RuleBroken(
                f"{'.'.join(path)}: an interpolation must be ${{field.name}}, ${{oc.env:NAME}} or "
                f"${{oc.decode:${{oc.env:NAME}}}}, got {_short('${' + name + '}')}; write the value"
            )
        parents = len(match[1])
        start = path[:-parents] if parents else ()
        yield (*start, *match[2].split("."))


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
