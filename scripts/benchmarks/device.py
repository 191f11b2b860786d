"""Time and memory on an accelerator, as multiples of what moving the logits takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .contestants import IN_PLACE, OURS, Contestant, find_contestants
from .report import markdown
from .work import Inputs, Work, make_inputs


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """A call's result and its milliseconds on the device."""
    if device.type != "cuda":
        started = time.perf_counter()
        return call(), (time.perf_counter() - started) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call()
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end)


def copy_bandwidth(size: int, device: torch.device, turns: int) -> float:
    """Bytes a millisecond, read and written both counted, of copying that many bytes; the best turn."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(timed(lambda: target.copy_(source), device)[1] for _ in range(turns + 1))


@dataclass(frozen=True)
class Timing:
    """Of one contestant at one piece of work, the best turn."""

    forward: float
    """Milliseconds."""
    backward: float
    peak: float
    """MiB above the inputs; 0 where the device does not tell."""


def measure(work: Work, name: str, device: torch.device, turns: int) -> Timing:
    run = find_contestants([name])[0][name]
    inputs = make_inputs(work, device=device)
    # the first compiles the kernels
    results = [_turn(run, inputs, work, device) for _ in range(turns + 1)]
    return min(results[1:], key=lambda timing: timing.forward + timing.backward)


def _turn(run: Contestant, inputs: Inputs, work: Work, device: torch.device) -> Timing:
    tensors = inputs.fresh()
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    loss, forward = timed(lambda: run(tensors, inputs.targets, work, None), device)
    _, backward = timed(lambda: torch.autograd.grad(loss, tensors), device)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if on_gpu else 0.0
    return Timing(forward, backward, peak)


def device_table(works: Sequence[Work], device: torch.device, turns: int) -> list[str]:
    """Ours, forward and backward, in milliseconds and as multiples of one read, and of one read and write."""
    size = max(int(work.logits_mib() * 2**20) for work in works)
    bandwidth = copy_bandwidth(size, device, turns)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rows = []
    for work in works:
        read = work.logits_mib() * 2**20 / bandwidth
        for contestant in (OURS, IN_PLACE):
            found = measure(work, contestant, device, turns)
            rows.append(
                [
                    *(work.vocabulary, work.tokens, work.dtype, work.kind, work.label, contestant),
                    *(f"{found.forward:.2f}", f"{found.forward / read:.2f}x"),
                    *(f"{found.backward:.2f}", f"{found.backward / (2 * read):.2f}x", f"{found.peak:.0f}"),
                ]
            )
    header = ["V", "T", "dtype", "logits", "work", "who", "forward ms", "/ read"]
    header += ["backward ms", "/ read and write", "peak MiB"]
    return [
        f"{name}, torch {torch.__version__}. A copy of {size / 2**20:.0f} MiB moves {bandwidth / 1e6:.1f} GB/s.",
        "",
        *markdown(header, rows),
    ]
