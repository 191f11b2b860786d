"""The command line on a forked rank."""

import contextlib
import io
import os
from pathlib import Path

from megatron_support.__main__ import main


def command(rank: int, world: int, folder: Path, arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command that is given in a folder; a function for ``run_ranks``."""
    out, err = io.StringIO(), io.StringIO()
    os.chdir(folder)  # a forked rank has a working folder of its own
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()
