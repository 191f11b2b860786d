"""The fused head under tensor and sequence parallelism: one process's numbers on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_support import SamplingParams
from megatron_support.support import fused_support_logprobs
from tests.ranks import run_ranks

VOCABULARY, WIDTH, SEQUENCE, BATCH = 45, 6, 8, 2


def _inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    targets = torch.randint(-1, VOCABULARY, (SEQUENCE, BATCH), generator=generator)
    return hidden, weight, bias, targets


def _run(rank, world, sequence_parallel):
    hidden, weight, bias, targets = _inputs()
    columns = -(-VOCABULARY // world)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, columns * world - VOCABULARY), value=3.0)
    padded_bias = torch.nn.functional.pad(bias, (0, columns * world - VOCABULARY), value=50.0)
    mine = slice(columns * rank, columns * (rank + 1))
    weight, bias = padded[mine].clone().requires_grad_(), padded_bias[mine].clone().requires_grad_()
    if sequence_parallel:
        hidden = hidden.chunk(world)[rank].clone()
    hidden.requires_grad_()
    found = fused_support_logprobs(
        hidden,
        weight,
        targets,
        SamplingParams(0.9, 12, 0.8),
        bias=bias,
        vocab_size=VOCABULARY,
        tp_group=dist.group.WORLD if world > 1 else None,
        sequence_parallel=sequence_parallel,
        entropy=True,
        chunk_size=5,
    )
    loss = torch.where(found.in_support, found.filtered, 0.0).sum() + found.unfiltered.square().sum()
    grads = torch.autograd.grad(loss + found.entropy.sum(), (hidden, weight, bias))
    return [t.detach() for t in (found.filtered, found.unfiltered, found.entropy)], grads


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_agrees_with_one_process(world, sequence_parallel):
    outputs, (of_hidden, of_weight, of_bias) = _run(0, 1, False)
    ranks = run_ranks(world, _run, sequence_parallel)
    close = {"rtol": 1e-10, "atol": 1e-10}
    for found, (hidden, _, _) in ranks:
        for mine, want in zip(found, outputs, strict=True):
            torch.testing.assert_close(mine, want, **close)
        if not sequence_parallel:
            torch.testing.assert_close(hidden, of_hidden, **close)
    if sequence_parallel:
        torch.testing.assert_close(torch.cat([grads[0] for _, grads in ranks]), of_hidden, **close)
    for number, want in ((1, of_weight), (2, of_bias)):
        joined = torch.cat([grads[number] for _, grads in ranks])
        torch.testing.assert_close(joined[:VOCABULARY], want, **close)
        assert not joined[VOCABULARY:].any()
