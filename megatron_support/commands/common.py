"""What commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_support.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_support.config import Recipe

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

SUCCESS = 0
FAILURE = 1
"""The input was fine and the answer is no."""
BAD_INPUT = 2


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RECIPE and FIELD.SUB=VALUE."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, see configs/")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # else argparse calls it required, where RECIPE alone is missing
        metavar="FIELD.SUB=VALUE",
        help="fields to set instead of the recipe's, e.g. optimizer.lr=1.0e-5",
    )


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe whose every field is right; none of the slow imports.

    Raises:
        ConfigurationError: every broken rule at once.
    """
    check_path_argument(path, "RECIPE")
    from megatron_support.config import load_recipe
    from megatron_support.training.tasks import unknown_task

    return load_recipe(path, overrides, check_task=unknown_task)


def check_ranks(recipe: Recipe, ranks: int | None) -> None:
    """Check a recipe's layout against the ranks that will run it; none of the slow imports.

    Weights that carry their own architecture are read later. So is everything under torchrun, whose ranks check
    together: one that ends early would have the launcher end the others before they have said why.

    Args:
        recipe: what will run.
        ranks: how many are started here; None for those of torchrun, or this one alone.

    Raises:
        ConfigurationError: every broken rule of the layout.
    """
    from megatron_support.config.layout import validate_layout

    if ranks is not None or "WORLD_SIZE" not in os.environ:
        validate_layout(recipe.model.architecture, recipe.parallel, ranks or 1)


def check_paths(options: argparse.Namespace) -> None:
    """Check the arguments that a command names in ``paths``: destinations, and how messages call them.

    Raises:
        ConfigurationError: as :func:`check_path_argument`.
    """
    for destination, argument in getattr(options, "paths", {}).items():
        path = getattr(options, destination)
        if path is not None:
            check_path_argument(path, argument)


def check_path_argument(path: str | Path, argument: str) -> None:
    """Check that a file can have the name that an argument gives.

    Raises:
        ConfigurationError: it has a NUL character, or is too long.
    """
    from megatron_support.config.path_text import check_path

    try:
        check_path(str(path))
    except ValueError as error:
        raise ConfigurationError(f"{argument} {error}") from None


def positive(text: str) -> int:
    """An argument that is an integer >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def say(line: str) -> None:
    """Print a line as it is."""
    sys.stdout.write(line + "\n")


def write_page(path: Path, page: str, argument: str) -> None:
    """Write an HTML page.

    Raises:
        ConfigurationError: the folder is missing or cannot be written, or no file can be there; ``argument`` named it.
    """
    from megatron_support.config.path_text import check_target

    try:
        check_target(path)
        path.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(
            f"{argument} must be a file that can be written, got {path} ({error.strerror}); give another"
        ) from None
