"""``megatron-support convert IN OUT``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_support.commands.common import SUCCESS, positive, say
from megatron_support.errors import RolloutError

if TYPE_CHECKING:
    from megatron_support.commands.common import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "convert",
        help="rollouts that another program dumped, as a rollout file of this package",
        description="Read the rollouts of a NeMo-RL, slime, prime-rl, Megatron-LM or (converted) SkyRL dump, or of a "
        "rollout file, and write them as OUT. Says what the dump has lost and what was assumed.",
    )
    parser.add_argument("source", metavar="IN", help="a dump, a file or a folder; see examples/reading_files.md")
    parser.add_argument("target", metavar="OUT", help="a file that ends in .parquet or .jsonl")
    parser.add_argument("--from", dest="format", metavar="FORMAT", help="the format of IN (default: by its content)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling of rows that do not say their own")
    parser.add_argument("--top-k", type=positive, metavar="K", help="the same")
    parser.add_argument("--top-p", type=float, metavar="P", help="the same")
    parser.add_argument("--reward-key", metavar="NAME", help="which reward, where IN has several by name")
    parser.add_argument(
        "--nonfinite",
        choices=("refuse", "outside", "mask"),
        default="refuse",
        help="a value at a response token that was NaN or infinite, which IN has lost: refuse it (default), take it as "
        "outside the support, or mask its sample",
    )
    parser.add_argument("--vocab-size", type=positive, metavar="N", help="refuse token ids at or above N")
    parser.set_defaults(command=run, paths={"source": "IN", "target": "OUT"})


def run(options: argparse.Namespace) -> int:
    """Read, write, and say what was lost."""
    from megatron_support.rollouts.files import check_ending, write_rollouts
    from megatron_support.rollouts.readers import Assumptions, read_dump

    source, target = Path(options.source), Path(options.target)
    check_ending(target)
    if os.path.realpath(target) == os.path.realpath(source):  # Path.resolve raises at links in a circle
        raise RolloutError(f"{target}: OUT must be another file than IN; give it another name")
    assumptions = Assumptions(sampling=_sampling(options), reward_key=options.reward_key, nonfinite=options.nonfinite)
    dump = read_dump(source, format=options.format, assumptions=assumptions, vocab_size=options.vocab_size)
    write_rollouts(target, dump.rollouts)
    tokens = int(dump.rollouts.response_mask.sum())
    say(f"{target}: {dump.rollouts.num_sequences} sequences, {tokens} response tokens, from {dump.format}")
    for note in dump.notes:
        say(f"  {note}")
    return SUCCESS


def _sampling(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the options say; None where they say nothing."""
    given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    if all(value is None for value in given.values()):
        return None
    return {**given, "temperature": 1.0 if given["temperature"] is None else given["temperature"]}
