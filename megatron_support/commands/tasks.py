"""``megatron-support tasks``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_support.commands.common import SUCCESS, say

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser("tasks", help="the built-in tasks of rollouts.type sampler")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """List the tasks."""
    from megatron_support.training.tasks import registered_tasks

    for task in registered_tasks():
        say(f"{task.name:<12}{task.description}")
    return SUCCESS
