"""``megatron-support replay FILE``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_support.commands.common import SUCCESS, positive, read_recipe

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands
    from megatron_support.config.recipe import Recipe
    from megatron_support.config.replay import ReplayConfig


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "replay",
        help="a loss over a dump that holds current log-probabilities, without a model",
        description="Recompute loss, metrics and per-token gradients of any loss from a rollout file that holds "
        "current log-probabilities: the folder of a run, or a file completed by 'score --role current'. A number that "
        "must be finite and is not is named by sample and token.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="a rollout file, a run folder, or a folder of them: then its newest run"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="FIELD.SUB=VALUE",
        help="fields to set, e.g. loss.surrogate.clip_high=0.28; without a recipe: of loss, advantages, minibatches",
    )
    parser.add_argument(
        "--recipe", metavar="RECIPE", help="whose loss it is (default: the run's own, or the default loss)"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="RECIPE|FIELD.SUB=VALUE",
        help="a second loss beside the first: another recipe, or the first with other fields",
    )
    parser.add_argument("--samples", type=positive, default=8, metavar="N", help="rows of the table of tokens (8)")
    parser.set_defaults(command=run, paths={"file": "FILE"})


def run(options: argparse.Namespace) -> int:
    """Print one replay, or two side by side."""
    from rich.console import Console

    from megatron_support.rollouts.files import read_rollouts
    from megatron_support.training.folder import ROLLOUTS, newest_run
    from megatron_support.training.replay import replay
    from megatron_support.training.replay_table import print_comparison, print_replay
    from megatron_support.training.saved import RECIPE

    named, changes = _split(options.compare or [])
    path, recipe_path = Path(options.file), options.recipe
    if path.is_dir():
        path = path if (path / ROLLOUTS).is_file() else newest_run(path)
        recipe_path = recipe_path or str(path / RECIPE)
        path = path / ROLLOUTS
    first, recipe = _configuration(recipe_path, options.overrides)
    second, _ = _configuration(named or recipe_path, changes if named else [*options.overrides, *changes])
    rollouts = read_rollouts(path, keep_faults=True)
    text_of = _text(recipe)
    console = Console()
    for name in sorted(rollouts.unknown_fields):
        console.print(f"{name}: unknown, as the file says of itself", markup=False, highlight=False)
    result = replay(first, rollouts)
    if options.compare is None:
        print_replay(result, console, text_of, samples=options.samples)
        return SUCCESS
    names = (_name(recipe_path, options.overrides), _name(named or recipe_path, changes))
    print_comparison(result, replay(second, rollouts), names, console, text_of, samples=options.samples)
    return SUCCESS


def _split(compared: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe and the fields of ``--compare``."""
    from megatron_support.errors import ConfigurationError

    recipes = [part for part in compared if "=" not in part]
    if len(recipes) > 1:
        raise ConfigurationError(f"--compare takes one recipe, got {recipes}; name one, and fields to set")
    return (recipes[0] if recipes else None), [part for part in compared if "=" in part]


def _name(recipe_path: str | None, overrides: Sequence[str]) -> str:
    return " ".join([recipe_path or "the default loss", *overrides])


def _configuration(recipe_path: str | None, overrides: Sequence[str]) -> tuple[ReplayConfig, Recipe | None]:
    from megatron_support.config.load import load_fields
    from megatron_support.config.replay import ReplayConfig

    if recipe_path is None:
        return load_fields(ReplayConfig, overrides), None
    recipe = read_recipe(recipe_path, overrides)
    return ReplayConfig(loss=recipe.loss, advantages=recipe.advantages, minibatches=recipe.train.minibatches), recipe


def _text(recipe: Recipe | None) -> Callable[[int], str]:
    from megatron_support.training.tasks import task_of
    from megatron_support.training.token_text import token_text

    if recipe is None:
        return lambda token: ""
    return token_text(recipe.model.weights, task_of(recipe))
