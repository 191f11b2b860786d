"""``megatron-support export RUN|CHECKPOINT OUT``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_support.commands.common import SUCCESS, say

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "export",
        help="a checkpoint as a Hugging Face folder",
        description="Write the weights of a checkpoint as config.json and safetensors, whatever layout saved them. "
        "One process gathers them in host memory; no GPU is used.",
    )
    parser.add_argument("path", metavar="RUN", help="a run folder (its newest checkpoint), or a checkpoint folder")
    parser.add_argument("out", metavar="OUT", help="the folder to write; must be empty, or not be there")
    parser.set_defaults(command=run, paths={"path": "RUN", "out": "OUT"})


def run(options: argparse.Namespace) -> int:
    """Export."""
    from megatron_support.training.saved import find_checkpoint

    checkpoint = find_checkpoint(Path(options.path).expanduser())  # before the slow imports
    from megatron_support.training.export import export_checkpoint

    export_checkpoint(checkpoint, options.out)
    say(f"{options.out}: weights of {checkpoint}")
    return SUCCESS
