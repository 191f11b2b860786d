"""Time, traffic and memory of cases: pieces of work done by a contestant."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .contestants import SORT, find_contestants
from .work import Inputs, Work, make_inputs

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 24)}
"""The allocator keeps memory between calls, so that page faults of the operating system are timed for nobody."""

_SLOW_TURNS = 2


@dataclass(frozen=True)
class Case:
    """A piece of work and who does it."""

    work: Work
    name: str


@dataclass
class Measured:
    """Of one case, on the slowest rank."""

    forward: list[float] = field(default_factory=list)
    """Milliseconds of each turn."""
    backward: list[float] = field(default_factory=list)
    bytes: float = 0.0
    """Handed to collectives by one rank, per token."""
    calls: int = 0
    """Collective calls."""

    @property
    def turns(self) -> list[float]:
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    @property
    def best(self) -> tuple[float, float]:
        """Milliseconds of forward and backward in the best turn."""
        return min(zip(self.forward, self.backward, strict=True), key=sum)

    @property
    def milliseconds(self) -> float:
        return sum(self.best)


def ratio(mine: Measured, other: Measured) -> float:
    """How many times longer the other took: the median over the turns that they shared."""
    return statistics.median(theirs / ours for ours, theirs in zip(mine.turns, other.turns, strict=False))


class Traffic:
    """Counts what a rank hands to all_reduce and all_gather."""

    def __enter__(self) -> Traffic:
        self.bytes = self.calls = 0
        self._kept = dist.all_reduce, dist.all_gather
        reduce, gather = self._kept

        def all_reduce(tensor, *args, **kwargs):
            self._count(tensor)
            return reduce(tensor, *args, **kwargs)

        def all_gather(parts, tensor, *args, **kwargs):
            self._count(tensor)
            return gather(parts, tensor, *args, **kwargs)

        dist.all_reduce, dist.all_gather = all_reduce, all_gather
        return self

    def __exit__(self, *_) -> None:
        dist.all_reduce, dist.all_gather = self._kept

    def _count(self, tensor: torch.Tensor) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        self.calls += 1


def time_once(run, inputs: Inputs, case: Case, group) -> tuple[float, float]:
    """Milliseconds of forward and of backward, on tensors that the contestant may destroy."""
    tensors = inputs.fresh()
    if group is not None:
        dist.barrier()
    started = time.perf_counter()
    loss = run(tensors, inputs.targets, case.work, group)
    middle = time.perf_counter()
    torch.autograd.grad(loss, tensors, allow_unused=True)  # a fused weight gradient is in main_grad
    return (middle - started) * 1e3, (time.perf_counter() - middle) * 1e3


def time_in_turns(cases: Sequence[Case], turns: int, group, peer: str | None) -> list[Measured]:
    """All cases, one after the other, over and over: a change of the machine's load hits all alike."""
    contestants, _ = find_contestants({case.name for case in cases}, peer)
    inputs = {work: make_inputs(work, *_place(group)) for work in {case.work for case in cases}}
    measured = [Measured() for _ in cases]
    for turn in range(-1, turns):
        for case, result in zip(cases, measured, strict=True):
            if case.name == SORT and not 0 <= turn < _SLOW_TURNS:
                continue
            forward, backward = time_once(contestants[case.name], inputs[case.work], case, group)
            if turn >= 0:  # what is loaded on first use is not timed
                result.forward.append(forward)
                result.backward.append(backward)
    if group is not None:
        for case, result in zip(cases, measured, strict=True):
            with Traffic() as traffic:
                time_once(contestants[case.name], inputs[case.work], case, group)
            result.bytes, result.calls = traffic.bytes / case.work.tokens, traffic.calls
    return measured


def _place(group) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _on_rank(rank: int, ranks: int, folder: str, rows: list[list[Case]], turns: int, peer: str | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    group = dist.group.WORLD if ranks > 1 else None
    results = []
    for row in rows:
        results.append([asdict(measured) for measured in time_in_turns(row, turns, group, peer)])
        if rank == 0:
            print(f"  {row[0].work.kind} {row[0].work.dtype} {row[0].work.label}", file=sys.stderr)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(rows: list[list[Case]], ranks: int, turns: int, peer: str | None) -> list[dict[Case, Measured]]:
    """Every row of cases, whose members take turns, on ``ranks`` tensor-parallel ranks of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        # forked, so that what is imported here is not imported again; one thread, so that there is none to lose
        mp.start_processes(_on_rank, (ranks, folder, rows, turns, peer), nprocs=ranks, start_method="fork")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return [
        {case: _slowest([Measured(**other[i][j]) for other in found]) for j, case in enumerate(row)}
        for i, row in enumerate(rows)
    ]


def _slowest(ranks: list[Measured]) -> Measured:
    """Of every turn the slowest rank's times."""
    first = ranks[0]
    pairs = [max(turn, key=sum) for turn in zip(*(zip(r.forward, r.backward, strict=True) for r in ranks), strict=True)]
    return Measured([f for f, _ in pairs], [b for _, b in pairs], first.bytes, first.calls)


def floors(work: Work) -> tuple[float, float]:
    """Milliseconds of one read of the logits, and of one read with one write."""
    (logits,) = make_inputs(work).tensors
    out = torch.empty_like(logits)
    read, write = math.inf, math.inf
    for _ in range(7):
        started = time.perf_counter()
        for row in logits:
            row.amax()
        middle = time.perf_counter()
        out.copy_(logits)
        read, write = min(read, middle - started), min(write, time.perf_counter() - middle)
    return read * 1e3, write * 1e3


def peak_memory(case: Case) -> float:
    """Peak of a fresh process above its inputs, in MiB; the lower of two, as loading code counts too."""
    environment = {k: v for k, v in os.environ.items() if k not in KEEP_MEMORY}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "benchmarks.measure", json.dumps(asdict(case.work)), case.name]
    peaks = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"measuring the memory of {case.name} failed:\n{done.stderr}")
        peaks.append(float(done.stdout))
    return min(peaks)


def _status(name: str) -> float:
    """MiB of a line of this process's status."""
    found = re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
    if found is None:
        raise SystemExit(f"/proc/self/status has no {name}; use --no-memory on this system")
    return int(found[1]) / 1024


class PeakMemory:
    """This process's peak resident memory since now, above what it holds now."""

    def __init__(self) -> None:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # the GNU allocator: what it holds but nobody uses is not part of the start
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def mib(self) -> float:
        return _status("VmHWM") - self._before


def _own_peak(case: Case) -> float:
    torch.set_num_threads(1)
    run = find_contestants({case.name})[0][case.name]
    inputs = make_inputs(case.work)
    few = Inputs((inputs.tensors[0][:2].clone(), *inputs.tensors[1:]), inputs.targets[:2])
    warm = few.fresh()
    # lazily loaded libraries are nobody's memory
    torch.autograd.grad(run(warm, few.targets, case.work, None), warm, allow_unused=True)
    tensors = inputs.fresh()
    memory = PeakMemory()
    torch.autograd.grad(run(tensors, inputs.targets, case.work, None), tensors, allow_unused=True)
    return memory.mib()


if __name__ == "__main__":
    print(_own_peak(Case(Work(**json.loads(sys.argv[1])), sys.argv[2])))
