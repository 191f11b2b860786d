"""Cases of the device kernels for Triton's interpreter.

The interpreter must be chosen before Triton is imported, so ``test_support_kernels.py`` runs this file in a process of
its own; pytest does not collect it by itself.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_support import SamplingParams, support_logprobs
from megatron_support.support import kernels

TOKENS, VOCABULARY = 7, 333


@pytest.fixture
def interpreted(monkeypatch):
    """The whole of support_logprobs with its device kernels, on CPU tensors."""
    from megatron_support.support.kernels import row_kernels

    for name in ("row_sums", "row_gradient"):
        plain = getattr(row_kernels, name)
        monkeypatch.setattr(row_kernels, name, lambda *a, plain=plain, **k: plain(*a, block=128, **k))
    monkeypatch.setattr(row_kernels, "_SPLITS", 2)
    calls = []
    monkeypatch.setattr(kernels, "usable", lambda logits, dtype: calls.append(1) is None)
    return calls


def run(logits: torch.Tensor, sampling: SamplingParams, ties: str, which: str):
    leaf = logits.clone().requires_grad_()
    targets = logits.float().masked_fill(logits.isnan(), 0.0).topk(3).indices[:, 1].contiguous()
    targets[2] = -1
    found = support_logprobs(leaf, targets, sampling, vocab_size=VOCABULARY - 3, entropy=True, ties=ties)
    upstream = torch.linspace(-1, 1, TOKENS)
    upstream[5] = 0.0
    terms = {"filtered": found.filtered, "unfiltered": found.unfiltered, "entropy": found.entropy}
    loss = sum(
        (torch.where(found.in_support & (upstream != 0), terms[name], 0.0) * upstream).sum() for name in which.split()
    )
    (grad,) = torch.autograd.grad(loss, leaf)
    return [t.detach() for t in terms.values()], grad


@pytest.mark.parametrize(
    ("dtype", "which"),
    [
        (torch.float32, "filtered"),
        (torch.float32, "unfiltered"),
        (torch.float32, "filtered unfiltered entropy"),
        (torch.bfloat16, "filtered unfiltered entropy"),
    ],
)
@pytest.mark.parametrize(
    ("sampling", "ties"),
    [
        (SamplingParams(), "group"),
        (SamplingParams(0.7, 20), "group"),
        (SamplingParams(torch.linspace(0.5, 1.5, TOKENS), None, 0.9), "index"),
    ],
)
def test_kernels_agree_with_plain_torch(interpreted, monkeypatch, dtype, which, sampling, ties):
    torch.manual_seed(0)
    logits = (torch.randn(TOKENS, VOCABULARY) * 2).to(dtype)
    logits[3] = logits[3].round()  # ties at the boundary
    logits[5] = math.nan  # without an upstream gradient
    logits[6, 10:20] = -math.inf
    outputs, grad = run(logits, sampling, ties, which)
    assert interpreted
    monkeypatch.setattr(kernels, "usable", lambda logits, dtype: False)
    want, want_grad = run(logits, sampling, ties, which)
    for mine, theirs in zip(outputs, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(grad, want_grad, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert not grad[[2, 5]].any()
