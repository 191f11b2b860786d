"""Replayed supports in an actor step: their distance from recomputed ones, and errors that name sample and token."""

from __future__ import annotations

import pytest
import torch

from megatron_support.errors import RolloutError
from megatron_support.types import RolloutSupport
from tests.megatron.actor_setup import VOCAB, make_rollouts, make_step
from tests.ranks import run_ranks

REPLAY = {"support": "replay"}
NAMES = (
    "support_jaccard",
    "replayed_support_size",
    "recomputed_support_size",
    "replayed_mass_outside",
    "recomputed_mass_outside",
)


def with_sets(rollouts, size):
    """Every response token n drawn from itself and the next ``size(n) - 1`` ids."""
    sets = [
        [(int(token) + i) % VOCAB for i in range(size(n))] if response else []
        for n, (token, response) in enumerate(zip(rollouts.tokens, rollouts.response_mask, strict=True))
    ]
    lengths = torch.tensor([0, *map(len, sets)])
    support = RolloutSupport(torch.tensor([i for ids in sets for i in ids]), lengths.cumsum(0))
    return rollouts.with_columns(support=support)


def _metrics(rank, world, parallel, size, top_k, microbatch=None):
    rollouts = with_sets(make_rollouts(), size)
    rollouts = rollouts.with_columns(
        top_k=torch.full_like(rollouts.top_k, top_k), top_p=torch.ones_like(rollouts.top_p)
    )
    step = make_step(parallel=parallel, logprobs=REPLAY, microbatch=microbatch, minibatches=1)
    metrics = step.step(rollouts).metrics
    return {name: metrics[name] for name in NAMES}


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {"tensor": 2}), (2, {"tensor": 1}), (2, {"tensor": 1, "pipeline": 2}), (2, {"tensor": 1, "context": 2})],
    ids=["TP", "DP", "PP", "CP"],
)
def test_the_comparison_is_that_of_one_rank(world, parallel):
    def size(n):
        return 2 + n % 3

    alone = run_ranks(1, _metrics, {}, size, 10)[0]
    response = make_rollouts().response_mask.nonzero().flatten()
    sizes = torch.tensor([size(int(n)) for n in response]).double()
    assert alone["replayed_support_size"] == pytest.approx(sizes.mean().item(), rel=1e-12)
    assert alone["recomputed_support_size"] == 10  # top-k 10 without ties
    assert 0 < alone["support_jaccard"] < 0.4 and 0 < alone["replayed_mass_outside"] < 1
    for together in run_ranks(world, _metrics, parallel, size, 10):
        assert together == pytest.approx(alone, rel=1e-5)


def test_whole_vocabulary_against_whole_vocabulary_is_no_distance():
    alone = run_ranks(1, _metrics, {}, lambda n: VOCAB, VOCAB)[0]
    want = {"support_jaccard": 1, "replayed_support_size": VOCAB, "recomputed_support_size": VOCAB}
    assert alone == pytest.approx({**want, "replayed_mass_outside": 0, "recomputed_mass_outside": 0}, abs=1e-6)


def test_a_recomputed_support_is_not_compared():
    def names(rank, world):
        return set(make_step(minibatches=1).step(with_sets(make_rollouts(), lambda n: 3)).metrics)

    assert not set(NAMES) & run_ranks(1, names)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, at: ids.index_fill(0, at, VOCAB), "a token id is outside the vocabulary of 100"),
        (lambda ids, at: ids.index_copy(0, at, ids[at] + 1 - 2 * (ids[at] == VOCAB - 1)), "not in its own set"),
    ],
)
def test_a_wrong_set_stops_every_rank_by_sample_and_token(change, message):
    """Sample 0-2's token 4 is at fault; data parallel, so that one rank alone would meet it in its microbatches."""

    def error(rank, world):
        rollouts = with_sets(make_rollouts(), lambda n: 1)
        token = int(rollouts.cu_seqlens[2]) + 4
        at = rollouts.support.offsets[token : token + 1]
        wrong = RolloutSupport(change(rollouts.support.token_ids, at), rollouts.support.offsets)
        step = make_step(logprobs=REPLAY)
        with pytest.raises(RolloutError) as caught:
            step.step(rollouts.with_columns(support=wrong))
        return str(caught.value)

    first, second = run_ranks(2, error)
    assert first == second
    assert first.startswith("replayed support of sample '0-2', token 4 (target ") and message in first
