#!/usr/bin/env python
"""Time, peak memory and traffic of support log-probabilities, against other ways to compute them.

    python scripts/bench_support.py --out bench/             # the whole table; a few minutes on one thread
    python scripts/bench_support.py --quick --tp 1 2 --peer other.py:support_logprobs

Contestants run interleaved in one process (per tensor-parallel rank) and their best times are compared, so that a
change of the machine's load hits all alike. Memory is the peak resident set of a fresh process above its inputs. The
allocator keeps memory between calls, so that page faults of the operating system are not timed for anybody.

* ``ours``: forward and backward of ``support_logprobs``; ``in place`` writes the gradient over the logits.
* ``sort twice``: float32 copy, full sort, scatter of the mask and log-softmax, the filter made again in backward.
* ``cross entropy``: ``megatron.core``'s vocabulary-parallel cross-entropy, where it can be imported. Unfiltered only.
* ``--peer FILE:FUNCTION``: any function ``f(logits, targets, top_k, top_p, want_entropy=...)`` that returns filtered,
  unfiltered and entropy; loaded from the file for timing.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_support import SamplingParams, support_logprobs

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 24)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    vocabulary: int
    tokens: int
    dtype: str
    kind: str
    top_k: int | None
    top_p: float
    entropy: bool = False

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p < 1

    def label(self) -> str:
        parts = [f"top_k {self.top_k}"] if self.top_k else []
        parts += [f"top_p {self.top_p}"] if self.top_p < 1 else []
        return (" + ".join(parts) or "no filter") + (", entropy" if self.entropy else "")


def make_logits(work: Work) -> torch.Tensor:
    """Peaked: a few tokens hold the mass. Broad: about two thousand do. Flat: nearly all do."""
    generator = torch.Generator().manual_seed(0)
    shape = (work.tokens, work.vocabulary)
    logits = torch.randn(shape, generator=generator)
    if work.kind == "peaked":
        spikes = torch.randint(0, work.vocabulary, (work.tokens, 24), generator=generator)
        logits = logits.mul_(2).scatter_add_(1, spikes, torch.rand(spikes.shape, generator=generator) * 6 + 10)
    elif work.kind == "broad":
        logits.mul_(3.5)
    return logits.to(DTYPES[work.dtype])


def total(filtered, unfiltered, entropy, work: Work) -> torch.Tensor:
    """What is differentiated: the filtered log-probabilities, or the unfiltered ones, and the entropy if asked for."""
    value = torch.where(filtered > -math.inf, filtered, 0.0).sum() if work.filters else unfiltered.sum()
    return value if entropy is None else value + entropy.sum()


def ours(logits, targets, work: Work, group, inplace: bool) -> torch.Tensor:
    found = support_logprobs(
        logits,
        targets,
        SamplingParams(1.0, work.top_k, work.top_p),
        vocab_size=work.vocabulary,
        tp_group=group,
        entropy=work.entropy,
        inplace_backward=inplace,
    )
    return total(found.filtered, found.unfiltered, found.entropy, work)


class SortTwice(torch.autograd.Function):
    """Gather the vocabulary, sort it, filter, take log-softmaxes; filter again in backward."""

    @staticmethod
    def keep(whole, work):
        values, ids = whole.sort(-1, descending=True)
        keep = torch.ones_like(values, dtype=torch.bool)
        if work.top_k is not None:
            keep[:, work.top_k :] = False
        if work.top_p < 1:
            mass = torch.softmax(values.masked_fill(~keep, -math.inf), -1)
            keep &= mass.cumsum(-1) - mass < work.top_p
        return torch.zeros_like(keep).scatter_(1, ids, keep)

    @staticmethod
    def gather(logits, work, group):
        whole = logits.float()
        if group is not None:
            parts = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, whole.contiguous(), group=group)
            whole = torch.cat(parts, 1)
        return whole

    @staticmethod
    def forward(ctx, logits, targets, work, group):
        whole = SortTwice.gather(logits, work, group)
        keep = SortTwice.keep(whole, work)
        filtered = torch.log_softmax(whole.masked_fill(~keep, -math.inf), -1)
        ctx.save_for_backward(logits, targets)
        ctx.work, ctx.group = work, group
        log_p = torch.log_softmax(whole, -1)
        entropy = -(log_p.exp() * log_p).sum(-1) if work.entropy else None
        at = targets[:, None]
        return filtered.gather(1, at).squeeze(1), log_p.gather(1, at).squeeze(1), entropy

    @staticmethod
    def backward(ctx, grad, grad_unfiltered, grad_entropy):
        logits, targets = ctx.saved_tensors
        whole = SortTwice.gather(logits, ctx.work, ctx.group)
        gradient = torch.zeros_like(whole)
        if ctx.work.filters:
            keep = SortTwice.keep(whole, ctx.work)
            kept_target = keep.gather(1, targets[:, None]).squeeze(1)
            share = torch.softmax(whole.masked_fill(~keep, -math.inf), -1)
            grad = torch.where(kept_target, grad, 0.0)
        else:
            share, grad = torch.softmax(whole, -1), grad_unfiltered
        gradient = share.mul_(-grad[:, None]).scatter_add_(1, targets[:, None], grad[:, None])
        if ctx.work.entropy:
            log_p = torch.log_softmax(whole, -1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1, keepdim=True)
            gradient -= grad_entropy[:, None] * p * (log_p + entropy)
        if ctx.group is not None:
            gradient = gradient.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)]
        return gradient.to(logits.dtype), None, None, None


def cross_entropy() -> Callable | None:
    """Megatron's vocabulary-parallel cross-entropy, ``f(logits [T, V/TP], targets, group)``, if it can be imported."""
    try:
        from megatron_support.megatron.host import prepare_import

        prepare_import()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    except ImportError:
        return None

    def run(logits, targets, group):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
        return vocab_parallel_cross_entropy(logits.unsqueeze(1), targets.unsqueeze(1))

    return run


def contestants(work: Work, group, peer: Callable | None, slow: bool) -> dict[str, Callable]:
    """name -> ``f(logits, targets)`` that returns a scalar to differentiate."""
    named: dict[str, Callable] = {
        "ours": lambda x, t: ours(x, t, work, group, False),
        "ours, in place": lambda x, t: ours(x, t, work, group, True),
    }
    if slow:
        named["sort twice"] = lambda x, t: total(*SortTwice.apply(x, t, work, group), work)
    if not work.filters and not work.entropy:
        megatron = cross_entropy() if dist.is_initialized() else None
        if megatron is not None:
            named["cross entropy"] = lambda x, t: megatron(x, t, group).sum()
    if peer is not None and group is None:
        named["peer"] = lambda x, t: total(*peer(x, t, work.top_k, work.top_p, want_entropy=work.entropy), work)
    return named


def pick_targets(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(3, -1).indices[:, 1].contiguous()


def time_once(run: Callable, logits, targets) -> tuple[float, float]:
    """Milliseconds of forward and of backward; the contestant owns a fresh copy of the logits."""
    leaf = logits.detach().requires_grad_()
    fresh = leaf * 1.0
    started = time.perf_counter()
    loss = run(fresh, targets)
    middle = time.perf_counter()
    torch.autograd.grad(loss, fresh)
    return (middle - started) * 1e3, (time.perf_counter() - middle) * 1e3


def floors(logits: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of one read of the logits, and of one read with one write."""
    out = torch.empty_like(logits)
    read, write = math.inf, math.inf
    for _ in range(5):
        started = time.perf_counter()
        for row in logits:
            row.amax()
        middle = time.perf_counter()
        out.copy_(logits)
        read, write = min(read, middle - started), min(write, time.perf_counter() - middle)
    return read * 1e3, write * 1e3


class Traffic:
    """Counts the bytes that a rank hands to all_reduce and all_gather, and the calls."""

    def __init__(self) -> None:
        self.bytes = self.calls = 0

    def __enter__(self):
        self._kept = dist.all_reduce, dist.all_gather
        reduce, gather = self._kept

        def all_reduce(tensor, *args, **kwargs):
            self.bytes += tensor.numel() * tensor.element_size()
            self.calls += 1
            return reduce(tensor, *args, **kwargs)

        def all_gather(parts, tensor, *args, **kwargs):
            self.bytes += tensor.numel() * tensor.element_size()
            self.calls += 1
            return gather(parts, tensor, *args, **kwargs)

        dist.all_reduce, dist.all_gather = all_reduce, all_gather
        return self

    def __exit__(self, *_):
        dist.all_reduce, dist.all_gather = self._kept


def load_peer(place: str | None) -> Callable | None:
    if place is None:
        return None
    path, _, name = place.partition(":")
    spec = importlib.util.spec_from_file_location("bench_peer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name or "support_logprobs")


def run_rank(rank: int, world: int, folder: str, works: list[Work], arguments: argparse.Namespace) -> None:
    """Measure on one tensor-parallel rank; rank 0 writes one line per work and contestant."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    group = dist.group.WORLD if world > 1 else None
    peer = load_peer(arguments.peer)
    results = []
    for work in works:
        logits = make_logits(work)
        targets = pick_targets(logits.float())
        columns = -(-work.vocabulary // world)
        shard = torch.nn.functional.pad(logits, (0, columns * world - work.vocabulary))
        shard = shard[:, columns * rank : columns * (rank + 1)].clone()
        named = contestants(work, group, peer, not arguments.no_sort)
        best: dict[str, list[float]] = {name: [math.inf, math.inf] for name in named}
        for turn in range(arguments.repeats):
            for name, run in named.items():
                if name == "sort twice" and turn >= 2:
                    continue
                dist.barrier()
                forward, backward = time_once(run, shard, targets)
                best[name] = min(best[name], [forward, backward], key=sum)
        with Traffic() as traffic:
            time_once(named["ours"], shard, targets)
        sent = {"bytes": traffic.bytes / work.tokens, "calls": traffic.calls}
        results.append({"work": work, "best": best, "floors": floors(shard), **sent})
        if rank == 0:
            print(f"  {work.kind} {work.dtype} {work.label()}: done", file=sys.stderr)
    torch.save([{**r, "work": vars(r["work"])} for r in results], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def measure(works: list[Work], world: int, arguments: argparse.Namespace) -> list[dict]:
    """Results of rank 0, with the slowest rank's times."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (world, folder, works, arguments), nprocs=world)
        ranks = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world)]
    for results in zip(*ranks, strict=True):
        for name in results[0]["best"]:
            results[0]["best"][name] = max((r["best"][name] for r in results), key=sum)
    return ranks[0]


MEMORY_PROGRAM = """
import re, sys, torch
sys.path.insert(0, {root!r})
import scripts.bench_support as bench
torch.set_num_threads(1)
work = bench.Work(**{work!r})
logits = bench.make_logits(work)
targets = bench.pick_targets(logits.float())
run = bench.contestants(work, None, None, True)[{name!r}]
bench.time_once(run, logits[:2].clone(), targets[:2])  # warm: lazily loaded libraries are nobody's memory
fresh = logits.requires_grad_() * 1.0
def high():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
def now():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")
before = now()
grad = torch.autograd.grad(run(fresh, targets), fresh)
print(high() - before)
"""


def peak_memory(work: Work, name: str) -> float:
    """Peak of a fresh process above its inputs, in MiB; the lower of two, as loading code counts too."""
    root = str(Path(__file__).resolve().parent.parent)
    program = MEMORY_PROGRAM.format(root=root, work=vars(work), name=name)
    environment = {k: v for k, v in os.environ.items() if k not in KEEP_MEMORY}
    peaks = []
    for _ in range(2):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"measuring the memory of {name} failed:\n{done.stderr}")
        peaks.append(int(done.stdout) / 2**20)
    return min(peaks)


def works(arguments: argparse.Namespace) -> list[Work]:
    filters = [(None, 0.9), (50, 0.9), (1000, 0.95), (None, 1.0)]
    found = []
    for vocabulary in arguments.vocabulary:
        for dtype in arguments.dtype:
            for kind in arguments.kind:
                found += [Work(vocabulary, arguments.tokens, dtype, kind, k, p) for k, p in filters]
                found.append(Work(vocabulary, arguments.tokens, dtype, kind, None, 1.0, entropy=True))
    return found


def table(results: list[dict], world: int, memory: dict) -> list[str]:
    """Markdown: times in ms and ratios of the other contestants' times to ours."""
    lines = [
        f"### Tensor parallel {world}",
        "",
        "| V | T | dtype | logits | work | ours: forward + backward ms | in place ms | read / read + write ms "
        "| sort twice | cross entropy | peer | bytes a token (calls) | peak MiB (in place), logits MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        work, best = Work(**result["work"]), result["best"]
        mine, inplace = best["ours"], sum(best["ours, in place"])
        ratios = [
            f"{sum(best[n]) / sum(mine):.2f}x" if n in best else "" for n in ("sort twice", "cross entropy", "peer")
        ]
        if "cross entropy" in best:
            ratios[1] += f" ({sum(best['cross entropy']) / inplace:.2f}x in place)"
        size = work.tokens * -(-work.vocabulary // world) * DTYPES[work.dtype].itemsize / 2**20
        peaks = memory.get(work)
        peak = f"{peaks[0]:.0f} ({peaks[1]:.0f}), {size:.0f}" if peaks else ""
        floor = "{:.1f} / {:.1f}".format(*result["floors"])
        cells = [
            work.vocabulary,
            work.tokens,
            work.dtype,
            work.kind,
            work.label(),
            f"{mine[0]:.1f} + {mine[1]:.1f}",
            f"{inplace:.1f}",
            floor,
            *ratios,
            f"{result['bytes']:.0f} ({result['calls']})",
            peak,
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return [*lines, ""]


def plot(results: list[dict], path: Path) -> None:
    """Times of all contestants, per work, as a bar chart on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [
        n
        for n in ("ours", "ours, in place", "peer", "cross entropy", "sort twice")
        if any(n in r["best"] for r in results)
    ]
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(results) + 1.5), layout="constrained")
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        rows = [(j, sum(r["best"][name])) for j, r in enumerate(results) if name in r["best"]]
        axes.barh([j + i * height for j, _ in rows], [ms for _, ms in rows], height, label=name)
    labels = [f"{Work(**r['work']).kind} {r['work']['dtype']}, {Work(**r['work']).label()}" for r in results]
    axes.set_yticks([j + 0.4 for j in range(len(results))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("forward + backward, ms")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def machine() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--kind", nargs="+", choices=["peaked", "broad", "flat"], default=["peaked", "broad", "flat"])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", help="FILE:FUNCTION of another implementation, timed at tensor parallel 1")
    parser.add_argument("--no-sort", action="store_true", help="leave out the slow full sort")
    parser.add_argument("--no-memory", action="store_true", help="leave out the fresh processes that measure memory")
    parser.add_argument("--quick", action="store_true", help="fp32 and the largest vocabulary alone")
    parser.add_argument("--out", type=Path, help="folder for support.md and support.png")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.dtype, arguments.vocabulary = ["fp32"], [max(arguments.vocabulary)]
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1"})
    todo = works(arguments)
    lines = [
        f"{machine()}, {os.cpu_count()} cores, one thread a rank, torch {torch.__version__}",
        "",
    ]
    first = None
    for world in arguments.tp:
        print(f"tensor parallel {world}", file=sys.stderr)
        results = measure(todo, world, arguments)
        memory = {}
        if world == 1:
            first = results
            if not arguments.no_memory:
                names = ("ours", "ours, in place")
                memory = {work: [peak_memory(work, name) for name in names] for work in todo}
        lines += table(results, world, memory)
    print("\n".join(lines))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "support.md").write_text("\n".join(lines) + "\n")
        if first is not None:
            plot(first, arguments.out / "support.png")


if __name__ == "__main__":
    main()
