#!/usr/bin/env python
"""Time, peak memory and traffic of support log-probabilities, against other ways to compute them.

    python scripts/bench_support.py --out support.md --plot support.svg     # everything, about half an hour
    python scripts/bench_support.py --sections work --tp 1                  # one table
    python scripts/bench_support.py --quick                                 # small sizes: does it run

With a CUDA device, ours is timed there instead, by events, against what moving the logits takes (bf16, T=8192 unless
told otherwise); ``--cpu`` keeps to the CPU, and all that follows is about it.

Contestants take turns in one process (per tensor-parallel rank, one thread each). Times are of the best turn, forward
+ backward; ratios are medians over the turns, so that a change of the machine's load hits both sides. Memory is the
peak resident set of a fresh process above its inputs. Whoever is not installed is left out, and named with the reason.

* ``ours``: ``support_logprobs``; ``in place`` writes the gradient over the logits.
* ``sort twice``: float32 copy, full sort, scatter of the mask and log-softmax, the filter made again in backward.
* ``cross entropy``: ``megatron.core``'s vocabulary-parallel one, which destroys the logits. Unfiltered work only.
* ``verl``: its log-probabilities and entropy, where installed. Unfiltered work only.
* ``--peer FILE:FUNCTION``: ``f(logits, targets, top_k, top_p, want_entropy=...)`` that returns filtered, unfiltered
  and entropy. Tensor parallel 1 only.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.contestants import FUSED, HEAD_FIRST, IN_PLACE, OURS, find_contestants, rivals
from benchmarks.device import device_table
from benchmarks.measure import KEEP_MEMORY, Case, floors, measure, peak_memory
from benchmarks.work import DTYPES, KINDS, Work

FILTERS = ((None, 0.9), (50, 0.9), (1000, 0.95), (None, 1.0))
SECTIONS = ("work", "dtype", "top_k", "growth", "response", "head")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU even where there is a CUDA device")
    parser.add_argument("--tokens", type=int, help="64, on a device 8192")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[151936, 32000])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the section dtype")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--head", type=int, nargs=2, default=[512, 896], metavar=("T", "H"), help="the fused head")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--peer", help="FILE:FUNCTION of another implementation")
    parser.add_argument("--no-sort", action="store_true", help="leave out the slow full sort")
    parser.add_argument("--no-memory", action="store_true", help="leave out the fresh processes that measure memory")
    parser.add_argument("--quick", action="store_true", help="a small vocabulary and few turns: shows that all runs")
    parser.add_argument("--out", type=Path, help="Markdown file")
    parser.add_argument("--plot", type=Path, help="picture (.svg, .png) of the work table at tensor parallel 1")
    options = parser.parse_args(arguments)
    options.device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    if options.tokens is None:
        options.tokens = 64 if options.device.type == "cpu" else 8192
    if options.quick:
        options.vocabulary, options.tokens, options.turns, options.tp = [2048], 8, 2, [1, 2]
        options.head, options.kind, options.dtype = [16, 32], ["peaked"], ["fp32", "bf16"]
    return options


def work_rows(options: argparse.Namespace, ranks: int, vocabulary: int, dtype: str, kinds: list[str]) -> list:
    """One row for each distribution and filter, all contestants in it."""
    rows = []
    for kind, (top_k, top_p), entropy in product(kinds, FILTERS, (False, True)):
        if entropy and (top_k is not None or top_p < 1):
            continue
        work = Work(vocabulary, options.tokens, dtype, kind, top_k, top_p, entropy)
        names = [OURS, IN_PLACE, *rivals(work, ranks, sort=not options.no_sort)]
        rows.append([Case(work, name) for name in names if name in options.found])
    return rows


def device_works(options: argparse.Namespace) -> list[Work]:
    """What is measured on a device: bf16, filters and distributions."""
    works = []
    for vocabulary, kind, (top_k, top_p) in product(options.vocabulary, options.kind, FILTERS):
        work = Work(vocabulary, options.tokens, "bf16", kind, top_k, top_p)
        works += [work] if work.filters else [work, replace(work, entropy=True)]
    return works


class Benchmark:
    """Runs the sections that were asked for and keeps their lines."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lines: list[str] = []
        self.largest = max(options.vocabulary)

    def title(self, text: str) -> None:
        print(text, file=sys.stderr)
        self.lines += [f"### {text}", ""]

    def measure(self, rows: list, ranks: int = 1) -> list:
        return measure(rows, ranks, self.options.turns, self.options.peer)

    def memory(self, cases: list[Case]) -> dict[Case, float]:
        cases = cases[-1:] if self.options.quick else cases
        return {} if self.options.no_memory else {case: peak_memory(case) for case in cases}

    def work(self) -> None:
        """Filters and distributions, for every vocabulary and number of ranks."""
        options = self.options
        for ranks, vocabulary in product(options.tp, options.vocabulary):
            self.title(f"V = {vocabulary:,}, tensor parallel {ranks}")
            rows = work_rows(options, ranks, vocabulary, "fp32", options.kind)
            first = ranks == 1 and vocabulary == self.largest
            memory = self.memory([c for row in rows for c in row if c.name in (OURS, IN_PLACE)]) if first else {}
            results = self.measure(rows, ranks)
            self.lines += report.work_table(results, ranks, memory)
            if first and options.plot is not None:
                options.plot.parent.mkdir(parents=True, exist_ok=True)
                report.plot(results, self.floor, options.plot)

    def dtype(self) -> None:
        """Number formats, peaked and flat."""
        self.title(f"Number formats, V = {self.largest:,}")
        kinds = [kind for kind in self.options.kind if kind != "broad"]
        dtypes = [dtype for dtype in self.options.dtype if dtype != "fp32"]
        rows = [row for dtype in dtypes for row in work_rows(self.options, 1, self.largest, dtype, kinds)]
        memory = self.memory([c for row in rows for c in row if c.name in (OURS, IN_PLACE)])
        self.lines += report.work_table(self.measure(rows), 1, memory)

    def top_k(self) -> None:
        """Growing k."""
        for ranks in self.options.tp:
            self.title(f"Growing k, tensor parallel {ranks}")
            base = Work(self.largest, self.options.tokens, top_p=0.9)
            counts = (1, 50, 200, 1000)
            rows = [[Case(replace(base, kind=kind, top_k=k), OURS) for k in counts] for kind in self.options.kind]
            self.lines += report.top_k_table(self.measure(rows, ranks), ranks)

    def growth(self) -> None:
        """Growing T, and growing V."""
        self.title("Growing T and V")
        tokens = self.options.tokens
        base = Work(self.largest, tokens)
        rows = []
        for kind, top_p in (("peaked", 0.9), ("flat", 0.9), ("peaked", 1.0)):
            work = replace(base, kind=kind, top_p=top_p)
            rows.append([Case(replace(work, tokens=tokens * times), OURS) for times in (1, 2, 4)])
            smaller = (self.largest // 4, self.largest // 2, self.largest)
            rows.append([Case(replace(work, vocabulary=vocabulary), OURS) for vocabulary in smaller])
        self.lines += report.growth_table(self.measure(rows))

    def response(self) -> None:
        """Response tokens alone, from logits: what ``logprobs.response_only`` saves."""
        self.title(f"Response tokens alone (logprobs.response_only), V = {self.largest:,}")
        base = Work(self.largest, self.options.tokens * 2)
        works = [replace(base, top_k=50, top_p=0.9), base]
        rows = [[Case(replace(work, response=share), OURS) for share in (1.0, 0.5, 0.2)] for work in works]
        self.lines += report.response_table(self.measure(rows))

    def head(self) -> None:
        """The head's product with it."""
        tokens, hidden = self.options.head
        self.title(f"Fused head, V = {self.largest:,}")
        base = Work(self.largest, tokens, top_k=50, top_p=0.9, hidden=hidden)
        works = [base, replace(base, top_k=None, top_p=1.0)]
        rows = [[Case(work, HEAD_FIRST), Case(work, FUSED), Case(replace(work, response=0.5), FUSED)] for work in works]
        memory = self.memory([case for row in rows for case in row if case.work.response == 1])
        self.options.turns = min(self.options.turns, 3)
        self.lines += report.head_table(self.measure(rows), memory)

    def run(self) -> list[str]:
        floor = Work(self.largest, self.options.tokens)
        self.floor = floors(floor)
        read, write = self.floor
        self.lines += [
            report.machine(),
            "",
            f"Floor for {floor.logits_mib():.0f} MiB of logits: one read {read:.1f} ms, read and write {write:.1f} ms.",
            "",
        ]
        for section in self.options.sections:
            getattr(self, section)()
        return self.lines


def write(lines: list[str], out: Path | None) -> None:
    print("\n".join(lines))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(lines) + "\n")


def main() -> None:
    options = parse()
    if options.device.type != "cpu":
        write(device_table(device_works(options), options.device, options.turns), options.out)
        return
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1"})
    found, missing = find_contestants(peer=options.peer)
    options.found = set(found)
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    lines = Benchmark(options).run()
    lines += [f"Left out: {name} ({reason})." for name, reason in missing.items()]
    write(lines, options.out)


if __name__ == "__main__":
    main()
