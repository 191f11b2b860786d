"""Support log-probabilities on a GPU: against float64 on the CPU, twice alike, without waiting, and in a CUDA graph.

Skipped without a GPU; there, it needs nothing but the package with its dev extra: ``pytest tests/gpu``.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_support import SamplingParams, support_logprobs
from tests.support_reference import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOKENS, VOCABULARY = 48, 5003
FILTERS = {
    "none": SamplingParams(0.8),
    "top_k": SamplingParams(1.0, 50),
    "top_k 3000": SamplingParams(1.0, 3000),
    "top_p": SamplingParams(1.0, None, 0.9),
    "both": SamplingParams(0.7, 200, 0.95),
}
KINDS = {"peaked": 4.0, "broad": 1.5, "flat": 0.01}


def make(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, VOCABULARY, generator=generator) * KINDS[kind]).to(dtype)
    return logits, logits.float().topk(40).indices[:, :: TOKENS // 16][:, 1].contiguous()


def evaluate(logits: torch.Tensor, targets: torch.Tensor, sampling: SamplingParams, ties: str = "group"):
    """Outputs, and the gradient of their sum over the targets in the support."""
    found = support_logprobs(logits, targets, sampling, entropy=True, ties=ties)
    kept = torch.where(found.in_support, found.filtered, 0.0)
    (gradient,) = torch.autograd.grad(kept.sum() + found.unfiltered.sum() + found.entropy.sum(), logits)
    return found.filtered.detach(), found.unfiltered.detach(), found.entropy.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("ties", ["group", "index"])
def test_float64_on_the_cpu_agrees(name, kind, dtype, ties):
    logits, targets = make(kind, dtype)
    sampling = FILTERS[name]
    filters = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    want = reference(logits, targets, ties=ties, **filters)
    filtered, unfiltered, entropy, gradient = evaluate(logits.cuda().requires_grad_(), targets.cuda(), sampling, ties)
    # rounding decides where a mass is that close to top-p's need
    sure = (want.boundary_gap.amin(1) > 2e-6) | (sampling.top_p == 1)
    assert sure.sum() > TOKENS // 2
    torch.testing.assert_close(unfiltered.cpu().double(), want.unfiltered.detach(), rtol=0, atol=5e-6)
    torch.testing.assert_close(entropy.cpu().double(), want.entropy.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(filtered.cpu().double()[sure], want.filtered.detach()[sure], rtol=0, atol=5e-6)
    kept = want.filtered.masked_fill(want.filtered == -math.inf, 0.0)
    (scaled,) = torch.autograd.grad(kept.sum() + want.unfiltered.sum() + want.entropy.sum(), want.scaled)
    exact = (scaled / sampling.temperature)[sure]
    relative = {torch.float32: 1e-4, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(gradient.cpu().double()[sure], exact, rtol=relative, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILTERS)
def test_two_runs_are_alike_bit_for_bit(name, kind):
    logits, targets = (tensor.cuda() for tensor in make(kind, torch.bfloat16))
    first, second = (evaluate(logits.clone().requires_grad_(), targets, FILTERS[name], "index") for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILTERS)
def test_the_host_does_not_wait(name, kind):
    logits, targets = (tensor.cuda() for tensor in make(kind, torch.bfloat16))
    logits.requires_grad_()
    targets[3] = -1
    evaluate(logits, targets, FILTERS[name], "index")  # compiles the kernels
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        evaluate(logits, targets, FILTERS[name], "index")
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILTERS)
def test_a_cuda_graph_replays_forward_and_backward(name, kind):
    """Captured on one batch, replayed on another."""
    logits, targets = (tensor.cuda() for tensor in make(kind, torch.bfloat16))
    other = logits.flip(0).contiguous()
    want = evaluate(other.clone().requires_grad_(), targets.flip(0).contiguous(), FILTERS[name])
    logits.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        evaluate(logits, targets, FILTERS[name])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = evaluate(logits, targets, FILTERS[name])
    with torch.no_grad():
        logits.copy_(other)
        targets.copy_(targets.flip(0))
    graph.replay()
    assert all(a.equal(b) for a, b in zip(results, want, strict=True))
