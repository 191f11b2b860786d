"""``megatron-support recipe``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_support.commands.common import SUCCESS, say

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "recipe",
        help="every field of a recipe: as JSON schema, or as a reference in Markdown",
        description="Print what a recipe may hold, generated from the code that reads it.",
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--schema", action="store_true", help="the JSON schema, for editors")
    choice.add_argument(
        "--reference", action="store_true", help="the reference in Markdown, as in configs/REFERENCE.md"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print it."""
    from megatron_support.config.reference import json_schema, markdown

    say(json_schema() if options.schema else markdown().removesuffix("\n"))
    return SUCCESS
