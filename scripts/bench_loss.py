"""What the actor loss costs beside a bare PPO loss in plain torch: forward and backward, on the CPU, in one run.

    python scripts/bench_loss.py [--shape 64 4096] [--repeats 30] [--threads 1]

Times are medians of this process's processor time, the candidates taken in turn, so that other work on the machine
disturbs them less. The allocator keeps memory between calls, so page faults of the operating system are timed for none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_support.config import ActorLossConfig
from megatron_support.loss import actor_loss

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "OMP_NUM_THREADS": "1"}


def make_inputs(rows: int, length: int) -> dict[str, Tensor]:
    """Log-probabilities of two close policies, one token in 500 outside the support, nine in ten a response token."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, length)
    curr = -2 * torch.rand(shape, generator=generator)
    prev = curr + 0.1 * torch.randn(shape, generator=generator)
    generation = prev + 0.05 * torch.randn(shape, generator=generator)
    outside = torch.rand(shape, generator=generator) < 0.002
    return {
        "curr_logprobs": curr.requires_grad_(),
        "prev_logprobs": prev.masked_fill(outside, -torch.inf),
        "generation_logprobs": generation,
        "advantages": torch.randn(rows, 1, generator=generator).expand(shape).contiguous(),
        "response_mask": torch.rand(shape, generator=generator) < 0.9,
        "sample_mask": torch.ones(rows, dtype=torch.bool),
    }


def bare_ppo(curr: Tensor, prev: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The textbook: no exclusion, no counts, no metrics."""
    ratio = (curr - prev).exp()
    losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return (losses * mask).sum() / mask.sum()


def measure(losses: dict[str, Callable[[], Tensor]], leaf: Tensor, repeats: int) -> dict[str, float]:
    """Median milliseconds of forward and backward, the candidates taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(repeats + 3):
        for name, loss in losses.items():
            leaf.grad = None
            start = time.process_time()
            loss().backward()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * statistics.median(values[3:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(64, 4096), metavar=("ROWS", "TOKENS"))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    inputs = make_inputs(*arguments.shape)
    curr, mask = inputs["curr_logprobs"], inputs["response_mask"].float()
    finite = torch.where(inputs["prev_logprobs"] == -torch.inf, curr.detach(), inputs["prev_logprobs"])
    config = ActorLossConfig()
    losses: dict[str, Callable[[], Tensor]] = {
        "bare PPO": lambda: bare_ppo(curr, finite, inputs["advantages"], mask),
        "actor_loss, minimal": lambda: actor_loss(config, **inputs, metrics="minimal").loss,
        "actor_loss, full": lambda: actor_loss(config, **inputs, metrics="full").loss,
    }
    times = measure(losses, curr, arguments.repeats)
    print(
        f"{arguments.shape[0]} x {arguments.shape[1]} tokens, fp32, {arguments.threads} thread(s), forward + backward"
    )
    for name, milliseconds in times.items():
        print(f"{name:22} {milliseconds:8.2f} ms  {milliseconds / times['bare PPO']:5.2f} x")


if __name__ == "__main__":
    if any(os.environ.get(name) is None for name in KEEP_MEMORY):  # read by the C library as a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**KEEP_MEMORY, **os.environ})
    main()
