"""An actor step that truncates is the actor step on a batch cut by hand, in every pass and every layout."""

import pytest
import torch

from tests.megatron.actor_setup import make_rollouts, make_step
from tests.ranks import run_ranks

BUDGET = 8  # of sequences with 5 to 16 tokens


def _run(rank, world, cut_by_hand, layout, parallel, optimizer=None):
    rollouts = make_rollouts()
    microbatch = {"max_tokens": BUDGET, "truncate": not cut_by_hand, "layout": layout}
    step = make_step(microbatch=microbatch, parallel=parallel, optimizer=optimizer)
    long = int((rollouts.lengths > BUDGET).sum())
    result = step.step(rollouts.truncated(BUDGET) if cut_by_hand else rollouts)
    metrics = {name: value for name, value in result.metrics.items() if not name.startswith("seconds/")}
    filled = result.rollouts
    return metrics, (filled.tokens, filled.prev_logprobs, filled.reference_logprobs, filled.advantages), long


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {"context": 2}), (2, {"pipeline": 2})])
def test_every_pass_sees_the_same_cut(world, parallel, layout):
    by_hand = run_ranks(world, _run, True, layout, parallel)
    truncated = run_ranks(world, _run, False, layout, parallel)
    for (expected, columns, long), (metrics, own, _) in zip(by_hand, truncated, strict=True):
        assert long > 1
        assert metrics == expected | {"truncated_sequences": long}
        for column, other in zip(columns, own, strict=True):
            assert torch.equal(column, other)
