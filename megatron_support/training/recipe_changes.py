"""What a run that goes on from a checkpoint changes about its recipe, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_support.config.recipe import Recipe

# what differs where nothing is changed about the training
_UNTOLD = {"logging", "checkpoint", "may_read"}
# what the learning rate is made of: Megatron's scheduler takes these from the checkpoint
_SCHEDULED = ("optimizer.lr", "optimizer.min_lr", "optimizer.schedule.", "train.steps")
_LONGEST = 80
"""Characters of a value in a line."""


def recipe_changes(saved: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """One line for each field in which a checkpoint's recipe is not the present one, and what that leaves as it was.

    Args:
        saved: the checkpoint's, as plain values; fields of another version of this package may be missing.
        recipe: of the run that goes on.
    """
    before = _leaves({name: value for name, value in saved.items() if name not in _UNTOLD})
    now = _leaves(recipe.model_dump(mode="json", exclude=_UNTOLD))
    names = [name for name in before | now if _shown(before, name, None) != _shown(now, name, None)]
    lines = [f"{name}: {_shown(before, name)} in the checkpoint, {_shown(now, name)} in this recipe" for name in names]
    if any(name.startswith(_SCHEDULED) for name in names):
        lines.append(
            "the learning rate goes on by the checkpoint's schedule, which is part of its optimizer's state; for "
            "another one, export the weights and start a new run from them"
        )
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
