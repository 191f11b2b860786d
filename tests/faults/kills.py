"""Ranks that die by SIGKILL inside a named part of a run, under the elastic launcher, which starts them again.

The parts are wrapped in the rank that is killed, in this process alone; the package knows nothing of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import elastic_launch

import megatron_support.megatron.model  # noqa: F401  (imported before ranks are forked)
from megatron_support.training.launch import launch_config
from tests.faults import runs

# part of a run: (module, owner in it, function)
PARTS = {
    "sampling": ("megatron.generate", "Sampler", "generate"),
    "previous pass": ("megatron.actor_step", "ActorStep", "_with_previous"),
    "forward and backward": ("megatron.actor_step", None, "run_schedule"),
    "optimizer step": ("megatron.actor_step", "ActorStep", "_apply"),
    "save": ("megatron.checkpoint_writer", "CheckpointWriter", "save"),
    "save, before the folder has its name": ("megatron.checkpoint_writer", None, "_sync_files"),
    "save, before `latest` points to it": ("training.checkpoints", "Checkpoints", "_publish"),
    "removing old checkpoints": ("training.checkpoints", None, "remove_checkpoint"),
    "metrics of a step": ("training.folder", "RunFolder", "write_step"),
    "end of the run": ("training.run", "_Loop", "_write_end"),
    "after the summary": ("training.run", None, "print_summary"),
}
# those that the first rank alone goes through
FIRST_RANK = {name for name in PARTS if name.startswith("save, ")} | {
    "removing old checkpoints",
    "metrics of a step",
    "after the summary",
}


@dataclass(frozen=True)
class Kill:
    """SIGKILL for one rank in one part."""

    part: str
    rank: int
    count: int
    """How often the part is entered before; 1 is the first time since the start of the process."""
    delay: float
    """Seconds into the part; it ends with the kill at the latest."""


def draw_kills(seed: int, parts: Sequence[str], *, ranks: int, every: int) -> list[Kill]:
    """One kill for each part, at a seeded moment."""
    generator = random.Random(seed)
    kills = []
    for part in parts:
        rank = 0 if part in FIRST_RANK else generator.randrange(ranks)
        late = every if part in ("sampling", "previous pass", "metrics of a step") else 1
        kills.append(Kill(part, rank, generator.randint(1, late), generator.uniform(0.0, 0.05)))
    return kills


@dataclass(frozen=True)
class KilledRun:
    """Attempt i dies by ``kills[i]``, the last one by none."""

    folder: Path
    overrides: list[str]
    kills: list[Kill]

    @property
    def log(self) -> Path:
        return self.folder / "events.jsonl"

    def events(self) -> list[dict[str, Any]]:
        """What happened, in order: ``{"attempt", "event": start | step | kill, "time", ...}``."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def run_with_kills(killed: Sequence[KilledRun], *, ranks: int) -> None:
    """Train under the elastic launcher, one run after the other; all are forked from one server, as it imports much.

    Raises:
        AssertionError: a run did not end within its restarts.
    """
    for run in killed:
        run.folder.mkdir(parents=True, exist_ok=True)
        run.log.touch()
    supervisor = multiprocessing.get_context("fork").Process(target=_supervise, args=(killed, ranks))
    supervisor.start()
    supervisor.join(120 * len(killed))
    if supervisor.is_alive():
        supervisor.terminate()
        supervisor.join(40)
    assert supervisor.exitcode == 0, f"exit code {supervisor.exitcode}; {[run.log.read_text() for run in killed]}"


def _supervise(killed: Sequence[KilledRun], ranks: int) -> None:
    # ranks are forked from a process that has imported everything and has one thread, unlike the launcher's
    multiprocessing.set_forkserver_preload(["tests.faults.kills"])
    for run in killed:
        config = dataclasses.replace(launch_config(ranks, len(run.kills)), start_method="forkserver")
        elastic_launch(config, _attempt)(run.folder, run.overrides, run.kills, run.log)


def _attempt(folder: Path, overrides: list[str], kills: list[Kill], log: Path) -> None:
    torch.set_num_threads(1)
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

    def write(event: str, **values: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps({"attempt": attempt, "event": event, "time": time.time(), **values}) + "\n")

    if rank == 0:
        write("start")
        _wrap("training.folder", "RunFolder", "write_step", _then_log(write))
    if attempt < len(kills) and kills[attempt].rank == rank:
        _wrap(*PARTS[kills[attempt].part], _deadly(kills[attempt], write))
    runs.run(rank, 0, folder, overrides)


def _then_log(write: Callable[..., None]) -> Callable[[Callable], Callable]:
    def wrapped(original: Callable) -> Callable:
        def call(self: Any, step: int, values: Any) -> None:
            original(self, step, values)
            write("step", step=step)

        return call

    return wrapped


def _deadly(kill: Kill, write: Callable[..., None]) -> Callable[[Callable], Callable]:
    left = kill.count

    def die() -> None:
        write("kill", part=kill.part, rank=kill.rank)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left:
                return original(*args, **kwargs)
            threading.Timer(kill.delay, die).start()
            original(*args, **kwargs)
            time.sleep(60)  # over before its time: the timer comes

        return call

    return wrapped


def _wrap(module: str, owner: str | None, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    target: Any = importlib.import_module(f"megatron_support.{module}")
    target = target if owner is None else getattr(target, owner)
    setattr(target, name, wrapper(getattr(target, name)))
