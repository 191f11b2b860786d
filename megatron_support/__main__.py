"""The command line: ``megatron-support`` or ``python -m megatron_support``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_support import __version__
from megatron_support.errors import ConfigurationError, Fault, RolloutError

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, or 2 where the input is at fault: the message has gone to stderr, from the first rank alone.
    """
    options = _parse(arguments)
    _be_quiet()
    try:
        return options.command(options)
    except (ConfigurationError, RolloutError, Fault) as error:
        if _speaks():
            sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, taking overrides on either side of options: argparse alone wants all of them in one place."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-") or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _train(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_support.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)  # before the slow imports: a typing error answers at once
    if options.ranks is not None:
        from megatron_support.training.launch import launch

        return launch(["train", options.recipe, *options.overrides], options.ranks)
    from megatron_support.training.run import train

    train(recipe, Console())
    return 0


def _validate(options: argparse.Namespace) -> int:
    from megatron_support.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from megatron_support.megatron.host import setup_host
    from megatron_support.training.checks import check_recipe, smallest_world

    setup_host(recipe.device)
    ranks = options.ranks or smallest_world(recipe)
    checked = check_recipe(recipe, ranks)
    _say(f"{options.recipe}: valid on {ranks} rank{'s' if ranks > 1 else ''}")
    architecture = checked.architecture
    _say(f"  model    {architecture.num_layers} layers of {architecture.hidden_size}, {architecture.vocab_size} tokens")
    if checked.task is not None:
        _say(f"  rollouts sampled, task {checked.task.name}: {checked.task.description}")
    if checked.rollouts is not None:
        batch = checked.rollouts
        tokens = int(batch.response_mask.sum())
        _say(
            f"  rollouts {batch.num_sequences} sequences, {tokens} response tokens, longest {int(batch.lengths.max())}"
        )
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_support.training.doctor import examine, print_findings

    findings = examine()
    print_findings(findings, Console())
    return BAD_INPUT if any(finding.state == "broken" for finding in findings) else 0


def _tasks(options: argparse.Namespace) -> int:
    from megatron_support.training.tasks import registered_tasks

    for task in registered_tasks():
        _say(f"{task.name:<12}{task.description}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-support",
        allow_abbrev=False,
        description="The actor step of LLM reinforcement learning on Megatron-Core.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train as a recipe says",
        description="Train as a recipe says: on one rank, on all that torchrun starts "
        "(torchrun --nproc-per-node 2 --no-python megatron-support train RECIPE), or with --ranks.",
    )
    _add_recipe(train)
    train.add_argument(
        "--ranks", type=_positive, metavar="N", help="start N ranks on this machine, as torchrun --standalone would"
    )
    train.set_defaults(command=_train)

    validate = commands.add_parser(
        "validate", help="check a recipe, its layout and its rollouts", description="Check a recipe; builds nothing."
    )
    _add_recipe(validate)
    validate.add_argument(
        "--ranks", type=_positive, metavar="N", help="number of ranks (default: what one copy of the model needs)"
    )
    validate.set_defaults(command=_validate)

    doctor = commands.add_parser("doctor", help="what this machine has, what is in use, what is missing")
    doctor.set_defaults(command=_doctor)
    tasks = commands.add_parser("tasks", help="the built-in tasks of rollouts.type sampler")
    tasks.set_defaults(command=_tasks)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, see configs/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="FIELD.SUB=VALUE",
        help="fields to set instead of the recipe's, e.g. optimizer.lr=1.0e-5",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def _be_quiet() -> None:
    """Leave the terminal to our own messages: no warnings of torch and Megatron, and nothing from other ranks."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if _rank() > 0:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        return
    for module in ("torch", "megatron"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
        logging.getLogger(module).setLevel(logging.ERROR)


def _speaks() -> bool:
    """Whether this rank reports an error: the first, and the first without a GPU of its own, which it alone knows."""
    if _rank() == 0:
        return True
    torch = sys.modules.get("torch")
    local = os.environ.get("LOCAL_RANK", "")
    return torch is not None and local.isdecimal() and 0 < torch.cuda.device_count() == int(local)


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
