"""Data and the parts in ``assets/`` -> one HTML page that needs nothing else."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any, Literal

_SCRIPTS = {
    "run": ("charts.js", "page.js", "samples.js", "run.js"),
    "rollouts": ("charts.js", "page.js", "samples.js", "inspect.js"),
}


def render(kind: Literal["run", "rollouts"], data: Mapping[str, Any]) -> str:
    """The page, with style, script and data inside.

    Args:
        kind: which page.
        data: plain values; numbers that are not finite become null. ``title`` names the page.
    """
    blob = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Template(_asset("page.html")).substitute(
        title=html.escape(str(data["title"])),
        style=_asset("style.css"),
        script="\n".join(_asset(name) for name in _SCRIPTS[kind]),
        data=blob.replace("<", "\\u003c"),  # nothing in the data can end the element that holds it
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same tree, with None for what JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
