"""Counts over ranks are exact integers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_support.distributed.counts import global_counts
from tests.ranks import run_ranks


def test_counts_are_exact_past_fp32_and_int32():
    """2^24 + 1 has no fp32, 2^31 no int32; a sum in either would be off by one or negative."""

    def on_rank(rank, world):
        local = torch.tensor([2**24 + 1, 2**31 + rank, 2**53 + 1, 0])
        total = global_counts(local, dist.group.WORLD)
        return total.tolist(), total.dtype == torch.int64, local.tolist()

    for rank, (total, is_int64, local) in enumerate(run_ranks(2, on_rank)):
        assert total == [2**25 + 2, 2**32 + 1, 2**54 + 2, 0] and is_int64
        assert local == [2**24 + 1, 2**31 + rank, 2**53 + 1, 0]  # not changed in place


def test_tokens_are_counted_over_the_whole_minibatch():
    """C11: rank 0 holds 1 and 3 response tokens, rank 1 two: 6 tokens in 3 sequences, a rank without any included."""

    def on_rank(rank, world):
        return global_counts(torch.tensor([[4, 2], [2, 1], [0, 0]][rank]), dist.group.WORLD).tolist()

    assert run_ranks(3, on_rank) == [[6, 3]] * 3


def test_one_rank_is_its_own_total_and_counts_are_integers():
    local = torch.tensor([3])
    total = global_counts(local, None)
    assert total.tolist() == [3] and total is not local
    with pytest.raises(AssertionError, match="counts are int64"):
        global_counts(torch.tensor([3.0]), None)
