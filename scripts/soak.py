#!/usr/bin/env python
"""Whether a long run stays as it began: memory, open files, time per step and disk of the quickstart's recipe.

    python scripts/soak.py                                          # 2,000 steps on one rank
    python scripts/soak.py --ranks 2 --steps 400 --checkpoint-every 100
    python scripts/soak.py --steps 200 rollouts.prompts_per_step=8  # any field of the recipe

Every rank is sampled at the beginning of each step, inside the package's own ``train()``. After a warm-up, the steps
are cut into quarters, and the last is compared with the first: medians of memory and times, the most of the counts.
Processor time is of one rank; other work on the machine adds little to it. Exit code 1 where a rank's memory
has grown by more than 1%, or where its open files or threads have become more. Linux: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.report import machine, markdown
from rich.console import Console

from megatron_support.config import load_recipe
from megatron_support.training.run import train

ROOT = Path(__file__).resolve().parent.parent
MOST_GROWTH = 0.01
"""Of memory, after the warm-up."""
DISK_EVERY = 10
"""Steps between looks at the run folder."""


@dataclass
class Samples:
    """What one rank was at the beginning of each step."""

    memory: list[float] = field(default_factory=list)
    """Resident MiB."""
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    """Seconds, a clock's."""
    processor: list[float] = field(default_factory=list)
    """Seconds that this process has used."""
    disk: list[dict[str, int]] = field(default_factory=list)
    """Bytes by name in the run folder; first rank alone, every ``DISK_EVERY`` steps."""

    def on_phase(self, runs: Path | None) -> Callable[[str, int, int], None]:
        """A callback of ``train`` that takes a sample as a step begins."""

        def sample(phase: str, done: int, total: int) -> None:
            if phase != "sampling":
                return
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            self.memory.append(resident * resource.getpagesize() / 2**20)
            self.files.append(len(os.listdir("/proc/self/fd")))
            self.threads.append(len(os.listdir("/proc/self/task")))
            self.wall.append(time.perf_counter())
            self.processor.append(time.process_time())
            if runs is not None and len(self.wall) % DISK_EVERY == 0:
                self.disk.append(sizes(runs))

        return sample


def sizes(runs: Path) -> dict[str, int]:
    """Bytes of each file or folder in the one run folder there is."""
    (run,) = runs.iterdir()
    return {path.name: _bytes(path) for path in sorted(run.iterdir())}


def _bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(os.path.getsize(Path(folder, name)) for folder, _, names in os.walk(path) for name in names)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="12 more than the warm-up, or more")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel, unless an override says otherwise")
    parser.add_argument("--warmup", type=int, help="steps that are not compared; a tenth of all by default")
    parser.add_argument("--checkpoint-every", type=int, help="steps; the last two are kept")
    parser.add_argument("--samples", type=Path, help="JSON file for everything that was sampled")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="of the recipe")
    options = parser.parse_args(arguments)
    if options.warmup is None:
        options.warmup = options.steps // 10
    if options.steps - options.warmup < 12:
        parser.error(f"--steps must be >= --warmup + 12 ({options.warmup} + 12), got {options.steps}; raise it")
    return options


def recipe_fields(options: argparse.Namespace, runs: Path) -> list[str]:
    """What is changed in the quickstart's recipe."""
    fields = [f"train.steps={options.steps}", f"parallel.tensor={options.ranks}", f"logging.run_dir={runs}"]
    fields += ["logging.progress=plain"]
    if options.checkpoint_every is not None:
        fields += [f"checkpoint.every={options.checkpoint_every}"]
    return [*fields, *options.overrides]


def run(options: argparse.Namespace) -> tuple[list[Samples], dict[str, int]]:
    """Train; returns each rank's samples, and the sizes of what the run left."""
    mp.set_forkserver_preload(["megatron_support.training.run", "benchmarks.report"])
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        runs = Path(folder, "runs")
        arguments = (options.ranks, folder, recipe_fields(options, runs))
        mp.start_processes(_on_rank, arguments, nprocs=options.ranks, start_method="forkserver")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
        return [Samples(**samples) for samples in found], sizes(runs)


def _on_rank(rank: int, ranks: int, folder: str, fields: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    samples = Samples()
    on_phase = samples.on_phase(Path(folder, "runs") if rank == 0 else None)
    train(load_recipe(ROOT / "configs/quickstart.yaml", fields), Console(file=sys.stderr, width=160), on_phase=on_phase)
    Path(folder, f"{rank}.json").write_text(json.dumps(asdict(samples)))


def quarters(values: Sequence[float], warmup: int) -> tuple[Sequence[float], Sequence[float]]:
    """The first and the last quarter of what comes after the warm-up."""
    rest = values[warmup:]
    size = len(rest) // 4
    return rest[:size], rest[-size:]


def differences(values: Sequence[float]) -> list[float]:
    """Of each step, from readings at the beginning of each."""
    return [after - before for before, after in pairwise(values)]


def compare(samples: Samples, warmup: int) -> tuple[list[list[str]], list[str]]:
    """Rows (quantity, first quarter, last quarter, growth) of one rank, and what is wrong with them."""
    rows, faults = [], []
    per_step = {
        "memory, MiB": samples.memory,
        "processor time of a step, s": differences(samples.processor),
        "time of a step, s": differences(samples.wall),
    }
    for name, values in per_step.items():
        first, last = map(statistics.median, quarters(values, warmup))
        rows.append([name, f"{first:.3f}", f"{last:.3f}", f"{last / first - 1:+.2%}"])
        if values is samples.memory and last > (1 + MOST_GROWTH) * first:
            faults.append(f"memory has grown by {last / first - 1:.2%}, from {first:.1f} to {last:.1f} MiB")
    for name, counts in {"open files": samples.files, "threads": samples.threads}.items():
        first, last = map(max, quarters(counts, warmup))
        rows.append([name, str(first), str(last), f"{last - first:+d}"])
        if last > first:
            faults.append(f"{name} have become more: {last} after {first}")
    return rows, faults


def disk_rows(samples: Samples, warmup: int, end: dict[str, int]) -> list[list[str]]:
    """Sizes of what is in the run folder: at the end of the warm-up, the most there was, at the end of the run."""
    first = samples.disk[min(warmup // DISK_EVERY, len(samples.disk) - 1)] if samples.disk else {}
    most = {name: max([size, *(look.get(name, 0) for look in samples.disk)]) for name, size in end.items()}
    kib = lambda size: f"{size / 1024:,.0f}"
    rows = [[name, kib(first.get(name, 0)), kib(most[name]), kib(size)] for name, size in end.items()]
    total = [sum(side.values()) for side in (first, *samples.disk, end)]
    return [*rows, ["all", *(kib(size) for size in (total[0], max(total), total[-1]))]]


def main() -> int:
    options = parse()
    if not Path("/proc/self/statm").exists():
        raise SystemExit("soak.py must run where /proc is, which is Linux; this system has no /proc/self/statm")
    ranks, end = run(options)
    if options.samples is not None:
        options.samples.write_text(json.dumps([asdict(samples) for samples in ranks]))
    steps = len(ranks[0].wall)
    print(f"{machine()}\n\n{options.ranks} ranks, {steps:,} steps, {options.warmup} of them to warm up.\n")
    rows, faults = [], []
    for rank, samples in enumerate(ranks):
        found, wrong = compare(samples, options.warmup)
        rows += [[str(rank), *row] for row in found]
        faults += [f"rank {rank}: {fault}" for fault in wrong]
    print("\n".join(markdown(["rank", "", "first quarter", "last quarter", "growth"], rows)))
    header = ["in the run folder, KiB", "after the warm-up", "most", "at the end"]
    print("\n".join(markdown(header, disk_rows(ranks[0], options.warmup, end))))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
