"""``megatron-support check``."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from megatron_support.commands.common import positive, read_recipe

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands

_RANKS = 4


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "check",
        help="compare every parallel layout that fits with one process",
        description="Run one batch with excluded tokens under every layout that fits the number of ranks and compare "
        "loss, metrics, log-probabilities, support and every gradient with one process, in float32. With a recipe: a "
        "few of its sequences, with drawn rewards, and its model, which has to fit into one process. Exit code 1 on a "
        "difference. Ranks are forked here (CPU), or are those that torchrun started "
        "(torchrun --nproc-per-node 8 --no-python megatron-support check).",
    )
    parser.add_argument(
        "--world",
        type=positive,
        metavar="N",
        help=f"CPU ranks to fork on this machine (default {_RANKS}, or one copy of the recipe's model)",
    )
    parser.add_argument(
        "--recipe", metavar="RECIPE", help="check this recipe's model, loss, sampling and layout instead"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="FIELD.SUB=VALUE", help="fields to set instead of the recipe's"
    )
    parser.add_argument("--own-layout", action="store_true", help="the recipe's own layout, and no other that fits")
    parser.add_argument("--full", action="store_true", help="every combination of layout, loss and microbatches")
    parser.add_argument("--json", metavar="FILE", help="write the table there too")
    parser.set_defaults(command=run, paths={"json": "--json"})


def run(options: argparse.Namespace) -> int:
    """Check, on this rank of torchrun's or on forked ones."""
    from megatron_support.errors import ConfigurationError

    if options.recipe is None and options.overrides:
        raise ConfigurationError(
            f"fields to set need --recipe RECIPE, got {' '.join(options.overrides)}; name the recipe, or drop them"
        )
    if options.own_layout and (options.recipe is None or options.full):
        raise ConfigurationError("--own-layout needs --recipe RECIPE and excludes --full; drop one of them")
    recipe = None if options.recipe is None else read_recipe(options.recipe, options.overrides)
    started = "TORCHELASTIC_RUN_ID" in os.environ
    if started and options.world is not None:
        raise ConfigurationError("--world forks ranks of its own, and torchrun has started some; drop --world")
    from megatron_support.config.layout import smallest_world
    from megatron_support.training.check_layouts.run import Request, check_forked, check_started

    request = Request(recipe=recipe, full=options.full, own_layout=options.own_layout, json_path=options.json)
    if started:
        return check_started(request)
    return check_forked(request, options.world or (_RANKS if recipe is None else smallest_world(recipe)))
