"""``megatron-support report RUN``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_support.commands.common import SUCCESS, say, write_page

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "report",
        help="a run folder as one HTML page",
        description="Write one HTML page about a run: what it learned, which tokens were excluded and why. "
        "It needs nothing but a browser.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, or a folder of them: then its newest run")
    parser.add_argument("--out", metavar="FILE", help="where to (default: report.html in the run folder)")
    parser.set_defaults(command=run, paths={"run": "RUN", "out": "--out"})


def run(options: argparse.Namespace) -> int:
    """Write the page."""
    from megatron_support.training.report.page import render
    from megatron_support.training.report.run_files import read_run
    from megatron_support.training.report.run_page import run_data

    files = read_run(options.run)
    path = Path(options.out) if options.out else files.path / "report.html"
    write_page(path, render("run", run_data(files)), "--out")
    say(f"{path}: {len(files.steps)} steps of {files.path}")
    return SUCCESS
