"""``megatron-support score FILE RECIPE``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_support.commands.common import SUCCESS, add_recipe, check_ranks, positive, read_recipe

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands

_ROLES = ("previous", "current", "reference", "teacher")


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "score",
        help="log-probabilities of a rollout file under a model, written back",
        description="Compute log-probabilities of a rollout file with a recipe's model and write them back as columns: "
        "on one rank, on all that torchrun starts, or with --ranks.",
    )
    parser.add_argument("file", metavar="FILE", help="a rollout file")
    add_recipe(parser)
    parser.add_argument("--output", required=True, metavar="OUT", help="the file to write, .jsonl or .parquet")
    parser.add_argument(
        "--role",
        choices=_ROLES,
        default="previous",
        help="whose they are, which says which columns they fill (default: previous)",
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="start N ranks on this machine")
    parser.set_defaults(command=run, paths={"file": "FILE", "output": "--output"})


def run(options: argparse.Namespace) -> int:
    """Score."""
    from rich.console import Console

    recipe = read_recipe(options.recipe, options.overrides)
    check_ranks(recipe, options.ranks)
    if options.ranks is not None:
        from megatron_support.training.launch import launch

        arguments = [options.file, options.recipe, *options.overrides, "--output", options.output]
        return launch(["score", *arguments, "--role", options.role], options.ranks)
    from megatron_support.training.scoring import score

    score(recipe, options.file, options.output, options.role, Console())
    return SUCCESS
