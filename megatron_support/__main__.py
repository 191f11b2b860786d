"""The command line: ``megatron-support`` or ``python -m megatron_support``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_support import __version__
from megatron_support.commands import COMMANDS
from megatron_support.commands.common import BAD_INPUT, FAILURE, check_paths
from megatron_support.errors import CheckpointError, ConfigurationError, Fault, PeerError, RolloutError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, or 2 where the input is at fault, or 1 where a disk is: the message has gone to stderr, from the first rank
        alone.
    """
    options = _parse(arguments)
    _be_quiet()
    try:
        check_paths(options)
        return options.command(options)
    except (ConfigurationError, RolloutError, Fault) as error:
        _say(error)
        return BAD_INPUT
    except CheckpointError as error:
        _say(error)
        return FAILURE
    except PeerError:
        return FAILURE
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-support",
        allow_abbrev=False,
        description="The actor step of LLM reinforcement learning on Megatron-Core.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


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
    # torch names the caller, and on the CPU its calls go through a mode of ours
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron_support\.megatron\.cpu_shim$")


def _say(error: Exception) -> None:
    """Report an error unless another rank does: the one that found it, the first, or the first without a GPU."""
    if hasattr(error, "spoken"):
        speaks = not error.spoken
    else:
        torch = sys.modules.get("torch")
        local = os.environ.get("LOCAL_RANK", "")
        alone = torch is not None and local.isdecimal() and 0 < torch.cuda.device_count() == int(local)
        speaks = _rank() == 0 or alone
    if speaks:
        sys.stderr.write(f"error: {error}\n")


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


if __name__ == "__main__":
    sys.exit(main())
