"""``megatron-support validate RECIPE``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_support.commands.common import SUCCESS, add_recipe, positive, read_recipe, say

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "validate", help="check a recipe, its layout and its rollouts", description="Check a recipe; builds nothing."
    )
    add_recipe(parser)
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="number of ranks (default: what one copy of the model needs)"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Check, and say what the recipe would train."""
    from megatron_support.config.layout import smallest_world, validate_layout

    recipe = read_recipe(options.recipe, options.overrides)
    ranks = options.ranks or smallest_world(recipe)
    validate_layout(recipe.model.architecture, recipe.parallel, ranks)  # before the slow imports
    from megatron_support.megatron.host import setup_host
    from megatron_support.training.checks import check_recipe

    setup_host(recipe.device)
    checked = check_recipe(recipe, ranks)
    say(f"{options.recipe}: valid on {ranks} rank{'s' if ranks > 1 else ''}")
    architecture = checked.architecture
    say(f"  model    {architecture.num_layers} layers of {architecture.hidden_size}, {architecture.vocab_size} tokens")
    if checked.task is not None:
        say(f"  rollouts sampled, task {checked.task.name}: {checked.task.description}")
    if checked.rollouts is not None:
        batch = checked.rollouts
        tokens = int(batch.response_mask.sum())
        say(f"  rollouts {batch.num_sequences} sequences, {tokens} response tokens, longest {int(batch.lengths.max())}")
    for note in checked.notes:
        say(f"  {note}")
    return SUCCESS
