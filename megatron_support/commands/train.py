"""``megatron-support train RECIPE``."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from megatron_support.commands.common import SUCCESS, add_recipe, check_ranks, positive, read_recipe

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "train",
        help="train as a recipe says",
        description="Train as a recipe says: on one rank, on all that torchrun starts "
        "(torchrun --nproc-per-node 2 --no-python megatron-support train RECIPE), or with --ranks.",
    )
    add_recipe(parser)
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="start N ranks on this machine, as torchrun --standalone would"
    )
    parser.add_argument(
        "--max-restarts",
        type=positive,
        default=0,
        metavar="N",
        help="with --ranks: start all ranks again, up to N times, after one has failed; see checkpoint.every",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Train."""
    from rich.console import Console

    from megatron_support.errors import ConfigurationError

    # before the slow imports: a typing error, or a layout that does not fit, answers at once
    recipe = read_recipe(options.recipe, options.overrides)
    check_ranks(recipe, options.ranks)
    if options.ranks is not None:
        from megatron_support.training.folder import ended_since
        from megatron_support.training.launch import launch

        start = time.time()
        return launch(
            ["train", options.recipe, *options.overrides],
            options.ranks,
            max_restarts=options.max_restarts,
            ended=lambda: ended_since(recipe, start),
        )
    if options.max_restarts:
        raise ConfigurationError("--max-restarts needs --ranks N, got none; add it, or give --max-restarts to torchrun")
    from megatron_support.training.run import train

    train(recipe, Console())
    return SUCCESS
