"""The support is the same set of ids however the vocabulary is split, and a large top-k takes two small collectives."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_support import SamplingParams, support_logprobs
from megatron_support.support import statistics
from megatron_support.support.arguments import build_rows
from megatron_support.support.evaluation import Request, evaluate
from megatron_support.support.rows import Chunk
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.support.windows import limits
from tests.ranks import run_ranks
from tests.support_reference import reference

FILTERS = [(300, 0.95), (300, 1.0), (200, 0.5), (50, 0.9), (None, 0.9), (None, 0.999)]
MASS_ROUNDING = 2e-6
"""Of a float32 mass over a vocabulary, relative to the row's; documented in ``support/README.md``."""


def make_rows(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Peaked, broad and flat rows, and rows whose frequent tokens have low ids, as in a tokenizer's vocabulary."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(24, vocabulary, generator=generator)
    scale = torch.tensor([4.0, 2.0, 1.0, 0.3, 2.0, 1.0]).repeat_interleave(4)[:, None]
    slope = torch.tensor([0.0, 0.0, 0.0, 0.0, 8.0, 3.0]).repeat_interleave(4)[:, None]
    return (noise * scale - slope * torch.linspace(0, 1, vocabulary)).to(dtype)


def find_sets(rank: int, world: int, logits: torch.Tensor, group=None) -> list[torch.Tensor]:
    """``[T, columns]`` bool for every filter and way with ties: the ids in the support, of this rank's columns."""
    vocabulary = logits.shape[1]
    columns = -(-vocabulary // world)
    padded = torch.nn.functional.pad(logits, (0, columns * world - vocabulary), value=90.0)
    part = padded[:, columns * rank : columns * (rank + 1)].contiguous()
    shard = VocabularyShard.of(columns, vocabulary, group or (dist.group.WORLD if world > 1 else None))
    wanted = torch.ones(len(logits), dtype=torch.bool)
    sets = []
    for (top_k, top_p), index_ties in itertools.product(FILTERS, (False, True)):
        sampling = SamplingParams(0.9, top_k, top_p)
        rows = build_rows(part, wanted, sampling, shard)
        request = Request(shard, sampling, None, False, index_ties, None)
        support = evaluate(rows, logits.float().argmax(-1), request, differentiable=False)
        whole = Chunk(slice(0, len(logits)), slice(0, len(logits)))
        sets.append(support.kept(rows, whole, rows.scaled(whole), shard).bool())
    return sets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [4096, 4001])
def test_the_support_is_the_same_set_for_every_split(vocabulary, dtype):
    """Bit for bit where shards are a multiple of 16; elsewhere only ids on the boundary, to rounding, may differ."""
    logits = make_rows(vocabulary, dtype)
    one = find_sets(0, 1, logits)
    cases = list(itertools.product(FILTERS, ("group", "index")))
    for world in (2, 4, 8):
        ranks = run_ranks(world, find_sets, logits)
        for number, ((top_k, top_p), ties) in enumerate(cases):
            joined = torch.cat([sets[number] for sets in ranks], 1)[:, :vocabulary]
            differing = joined != one[number]
            if vocabulary % (16 * world) == 0:
                assert not differing.any(), f"TP {world}, {top_k}, {top_p}, {ties}: {int(differing.sum())} ids differ"
            elif differing.any():
                targets = torch.zeros(len(logits), dtype=torch.int64)
                expected = reference(logits, targets, temperature=0.9, top_k=top_k, top_p=top_p, ties=ties)
                far = differing & (expected.boundary_gap > MASS_ROUNDING)
                assert not far.any(), f"TP {world}: {int(far.sum())} of {int(differing.sum())} ids are not on the edge"


def test_sets_are_those_of_a_float64_sort():
    """What the splits are compared with is right."""
    logits = make_rows(4096, torch.float32)
    targets = torch.zeros(len(logits), dtype=torch.int64)
    for ((top_k, top_p), ties), found in zip(
        itertools.product(FILTERS, ("group", "index")), find_sets(0, 1, logits), strict=True
    ):
        expected = reference(logits, targets, temperature=0.9, top_k=top_k, top_p=top_p, ties=ties)
        assert not ((found != expected.kept) & (expected.boundary_gap > MASS_ROUNDING)).any()


def _tied_rows(vocabulary: int) -> torch.Tensor:
    """Ties at the 262nd largest logit: one value in few or many places, on the first half's rank alone or on all."""
    noise = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(4))
    rows = noise - 9
    rows[0, :200], rows[0, 200:320] = noise[0, :200] + 9, 1.0  # more ties than the rank's candidates hold
    for row, equal in ((1, 255), (2, 256)):  # as many as are told apart, and one more
        rows[row, :10], rows[row, 10 : 10 + equal] = noise[row, :10] + 9, 1.0
    rows[3] = 2.5
    rows[4] = (noise[4] * 2).round()
    rows[5] = (noise[5] * 40).round() / 16
    return rows


def _tied(rank: int, world: int, logits: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    columns = logits.shape[1] // world
    part = logits[:, columns * rank : columns * (rank + 1)].contiguous()
    group = dist.group.WORLD if world > 1 else None
    return [
        support_logprobs(
            part, targets, SamplingParams(1.0, 262, top_p), vocab_size=logits.shape[1], tp_group=group, ties=ties
        ).filtered
        for top_p in (1.0, 0.9999, 0.6)
        for ties in ("group", "index")
    ]


def test_ties_at_a_large_top_k_are_all_counted():
    """Probes of every row: inside, in the tie group's first and last places, and outside."""
    logits = _tied_rows(4096).repeat_interleave(5, 0)
    targets = torch.tensor([0, 12, 264, 265, 319]).repeat(6)
    one = _tied(0, 1, logits, targets)
    settings = [(top_p, ties) for top_p in (1.0, 0.9999, 0.6) for ties in ("group", "index")]
    for found, (top_p, ties) in zip(one, settings, strict=True):
        expected = reference(logits, targets, top_k=262, top_p=top_p, ties=ties)
        torch.testing.assert_close(found.double(), expected.filtered, rtol=1e-6, atol=3e-6)
    for ranks in run_ranks(2, _tied, logits, targets):
        for mine, theirs in zip(one, ranks, strict=True):
            assert torch.equal(mine, theirs)


def _with_wrong_limits(rank: int, world: int, logits: torch.Tensor, move: float) -> list[torch.Tensor]:
    def moved(*args):
        return [limit + move for limit in limits(*args)]

    with mock.patch.object(statistics, "limits", moved):
        return find_sets(rank, world, logits)


@pytest.mark.parametrize("move", [-2.0, 2.0])
def test_limits_that_do_not_surround_the_boundary_are_found_out(move):
    """Above by more than the places reach, or below the boundary: the row is counted over, with the same result."""
    logits = make_rows(4096, torch.float32)
    one = find_sets(0, 1, logits)
    ranks = run_ranks(2, _with_wrong_limits, logits, move)
    for number, mine in enumerate(one):
        assert torch.equal(torch.cat([sets[number] for sets in ranks], 1), mine)


def _traffic(rank: int, world: int, logits: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
    """Collective calls of forward and backward, and bytes that this rank handed to them."""
    sent: list[int] = []
    gather = dist.all_gather

    def counted(parts, tensor, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return gather(parts, tensor, **kwargs)

    columns = logits.shape[1] // world
    part = logits[:, columns * rank : columns * (rank + 1)].clone().requires_grad_()
    with mock.patch.object(dist, "all_gather", counted), mock.patch.object(dist, "all_reduce", side_effect=OSError):
        found = support_logprobs(
            part, targets, SamplingParams(1.0, 1000, 0.95), vocab_size=logits.shape[1], tp_group=dist.group.WORLD
        )
        found.filtered.sum().backward()
    return len(sent), sum(sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_1000_takes_two_collectives_of_600_bytes_a_token(dtype):
    logits = make_rows(16384, dtype)
    logits[0, 8192:] = -torch.inf  # all of one rank's
    targets = logits.float().argmax(-1)
    for calls, size in run_ranks(2, _traffic, logits, targets):
        assert calls == 2 and size <= 600 * len(targets)
