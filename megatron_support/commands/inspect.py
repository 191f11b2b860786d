"""``megatron-support inspect FILE``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_support.commands.common import FAILURE, SUCCESS, positive, read_recipe, say, write_page

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "inspect",
        help="a rollout file before training: lengths, rewards, filters, what is missing or odd",
        description="Look at a rollout file. Ends with 1 where rows would be refused by training.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="a rollout file, .jsonl or .parquet; convert other programs' dumps"
    )
    parser.add_argument("--html", metavar="OUT", help="write the same, with samples, as one HTML page")
    parser.add_argument("--vocab-size", type=positive, metavar="N", help="refuse token ids at or above N")
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="the recipe whose model has the tokenizer, for the text of tokens in the page",
    )
    parser.set_defaults(command=run, paths={"file": "FILE", "html": "--html"})


def run(options: argparse.Namespace) -> int:
    """Print what the file holds, and write the page where it is asked for."""
    from rich.console import Console

    from megatron_support.rollouts.files import read_sound_rollouts
    from megatron_support.training.report.rollout_page import print_rollouts, rollout_page

    rollouts, errors = read_sound_rollouts(options.file, vocab_size=options.vocab_size)
    print_rollouts(options.file, rollouts, errors, Console())
    if rollouts is None:
        say("not one row is a rollout; if another program wrote this file:")
        say(f"  megatron-support convert {options.file} OUT.parquet")
    if options.html:
        tokens = [] if rollouts is None else rollouts.tokens.unique().tolist()
        text = _text(options.recipe, tokens) if options.recipe else {}
        write_page(Path(options.html), rollout_page(options.file, rollouts, errors, text), "--html")
        say(f"page in {options.html}")
    return FAILURE if errors else SUCCESS


def _text(recipe_path: str, tokens: list[int]) -> dict[int, str]:
    from megatron_support.training.tasks import task_of
    from megatron_support.training.token_text import plain_token_text

    recipe = read_recipe(recipe_path)
    text_of = plain_token_text(recipe.model.weights, task_of(recipe))
    return {token: text_of(token) for token in tokens}
