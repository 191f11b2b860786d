"""Sequence sums over context-parallel ranks: value and gradient of the unsplit sequence."""

import torch

from megatron_support.distributed.sequence_sum import sum_over_group
from tests.ranks import run_ranks

LOG_RATIOS = torch.tensor([0.4, 0.2, -0.1, 0.1], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)


def _whole():
    x = LOG_RATIOS.clone().requires_grad_(True)
    s = x.sum()
    (s.exp() * WEIGHTS).sum().backward()
    return s.detach(), x.grad


def _shard(rank, world):
    shard = slice(rank * 2, rank * 2 + 2)
    x = LOG_RATIOS[shard].clone().requires_grad_(True)
    s = sum_over_group(x.sum()[None], torch.distributed.group.WORLD)
    (s.exp() * WEIGHTS[shard]).sum().backward()
    return s.detach(), x.grad


def test_shards_give_the_value_and_gradient_of_the_whole_sequence():
    value, grad = _whole()
    results = run_ranks(2, _shard)
    for s, _ in results:
        torch.testing.assert_close(s[0], value, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.cat([g for _, g in results]), grad, rtol=1e-13, atol=0)


def _without_tokens(rank, world):
    """Rank 1 holds no token of the sequence and gives its sum no weight: it still joins both collectives."""
    x = LOG_RATIOS.clone().requires_grad_(True)
    local = x.sum()[None] if rank == 0 else torch.zeros(1, dtype=torch.float64, requires_grad=True)
    s = sum_over_group(local, torch.distributed.group.WORLD)
    (s.exp() * WEIGHTS.sum() if rank == 0 else s * 0.0).sum().backward()
    return x.grad


def test_a_rank_without_tokens_joins_and_changes_nothing():
    _, grad = _whole()
    torch.testing.assert_close(run_ranks(2, _without_tokens, timeout=60)[0], grad, rtol=1e-13, atol=0)


def test_one_rank_needs_no_group():
    assert sum_over_group(LOG_RATIOS, None) is LOG_RATIOS
