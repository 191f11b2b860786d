"""Cases of the device kernels for Triton's interpreter.

The interpreter must be chosen before Triton is imported, so ``test_support_kernels.py`` runs this file in a process of
its own; pytest does not collect it by itself.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_support import RolloutSupport, SamplingParams, support_logprobs
from megatron_support.support import kernels

TOKENS, VOCABULARY, PADDING = 7, 333, 3


@pytest.fixture
def interpreted(monkeypatch):
    """The whole of support_logprobs with its device kernels, on CPU tensors; none may fail."""
    from megatron_support.support.kernels import boundary, gradient, selection, statistics

    for module in (boundary, gradient, selection, statistics):
        monkeypatch.setattr(module, "BLOCK", 128)
    for module in (boundary, statistics):
        monkeypatch.setattr(module, "_SPLITS", 2)
    monkeypatch.setattr(boundary, "_PROGRAMS", 3)
    monkeypatch.setattr(kernels, "runs_on", lambda device: True)
    started = []
    launch = kernels.launch

    def counted(kernel, *arguments, **options):
        started.append(kernel.__name__)
        launch(kernel, *arguments, **options)

    for module in (boundary, gradient, selection, statistics):
        monkeypatch.setattr(module, "launch", counted)
    monkeypatch.setattr(kernels._State, "failed", False)
    yield started
    assert not kernels._State.failed


def plainly(monkeypatch, function, *arguments, **options):
    """What plain torch makes of it."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "runs_on", lambda device: False)
        return function(*arguments, **options)


@dataclass(frozen=True)
class Outcome:
    outputs: list[torch.Tensor]
    in_support: torch.Tensor
    gradient: torch.Tensor


def run(logits: torch.Tensor, sampling: SamplingParams, which: str, *, inplace: bool = False, **options) -> Outcome:
    """Outputs and a gradient; one row has no target, and one no upstream gradient."""
    leaf = logits.clone().requires_grad_()
    targets = logits.float().masked_fill(logits.isnan(), 0.0)[:, : VOCABULARY - PADDING].topk(3).indices[:, 1]
    targets = targets.contiguous()
    targets[2] = -1
    options = {"vocab_size": VOCABULARY - PADDING, "entropy": "entropy" in which, **options}
    found = support_logprobs(leaf * 1.0, targets, sampling, inplace_backward=inplace, **options)
    upstream = torch.linspace(-1, 1, logits.shape[0], device=logits.device)
    upstream[5] = 0.0
    terms = {"filtered": found.filtered, "unfiltered": found.unfiltered, "entropy": found.entropy}
    # a masked_fill leaves the row without a target in, with an upstream gradient
    loss = sum((terms[n].masked_fill(~found.in_support | (upstream == 0), 0.0) * upstream).sum() for n in which.split())
    (gradient,) = torch.autograd.grad(loss, leaf)
    outputs = [t.detach() for t in terms.values() if t is not None]
    return Outcome(outputs, found.in_support, gradient)


def make_logits(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Distributions that end in different passes, with rows that are out of the ordinary."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator)
    if kind == "peaked":
        logits[:, :9] += torch.linspace(12, 16, 9)
    elif kind == "ties":
        logits = (logits * 2).round()
    elif kind == "equal":
        logits.fill_(-3.25)
    if kind != "equal":
        logits[6, 10:20] = -math.inf
        logits[1] *= 1000
    logits[2] = math.nan  # without a target
    logits[5] = math.nan  # without an upstream gradient
    logits[:, VOCABULARY - PADDING :] = 1e4
    return logits.to(dtype)


MIXED = SamplingParams(torch.linspace(0.5, 1.5, TOKENS), None, torch.linspace(0.3, 1.0, TOKENS))
FILTERS = {
    "none": SamplingParams(),
    "temperature": SamplingParams(0.7),
    "top_k": SamplingParams(0.7, 20),
    "top_k 1": SamplingParams(1.3, 1),
    "top_p": SamplingParams(1.0, None, 0.9),
    "top_p, tiny": SamplingParams(1.0, None, 1e-4),
    "both": SamplingParams(1.0, 40, 0.8),
    "mixed": MIXED,
}


def assert_same(mine: Outcome, other: Outcome, dtype: torch.dtype) -> None:
    for ours, theirs in zip(mine.outputs, other.outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert mine.in_support.equal(other.in_support)
    relative = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(mine.gradient, other.gradient, rtol=relative, atol=1e-6)
    assert not mine.gradient[[2, 5]].any()
    assert not mine.gradient[:, VOCABULARY - PADDING :].any()


@pytest.mark.parametrize("ties", ["group", "index"])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "equal"])
@pytest.mark.parametrize("name", FILTERS)
def test_kernels_agree_with_plain_torch(interpreted, monkeypatch, name, kind, ties):
    """Few candidates, so that flat rows need the search and peaked ones do not."""
    if ties == "index" and not FILTERS[name].filters:
        pytest.skip("no boundary to cut")
    monkeypatch.setattr("megatron_support.support.arguments._TOP_P_CANDIDATES", 24)
    logits = make_logits(kind, torch.float32)
    for which in ("filtered", "filtered unfiltered entropy"):
        mine = run(logits, FILTERS[name], which, ties=ties)
        assert_same(mine, plainly(monkeypatch, run, logits, FILTERS[name], which, ties=ties), torch.float32)
    assert "_statistics_kernel" in interpreted and "_gradient_kernel" in interpreted
