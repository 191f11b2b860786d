"""An error of one rank is raised by all of them, with the same type and message, in bounded time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_support.distributed.errors import raise_together
from megatron_support.errors import ConfigurationError, Fault, GradientFault, LogprobFault, RolloutError
from tests.ranks import run_ranks

SECONDS = 30.0
"""A rank that waits for one that has left would wait for minutes."""


def outcome(error: Exception | None) -> tuple[type, str, float]:
    """(type, message) of what a rank raises; and that the ranks are in step after it."""
    kind: type = type(None)
    message = ""
    try:
        raise_together(error, dist.group.WORLD)
    except Exception as raised:
        kind, message = type(raised), str(raised)
    total = torch.ones(1)
    dist.all_reduce(total)
    return kind, message, total.item()


@pytest.mark.parametrize(
    "kind", [ConfigurationError, GradientFault, LogprobFault, Fault, RolloutError, ValueError, RuntimeError]
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_every_rank_raises_what_one_found(kind, culprit):
    """C24: NaN at a valid token on one rank only."""

    def on_rank(rank, world):
        return outcome(kind("rank says: curr_logprobs is nan at sample 'a', token 3") if rank == culprit else None)

    expected = (kind, "rank says: curr_logprobs is nan at sample 'a', token 3", 2.0)
    assert run_ranks(2, on_rank, timeout=SECONDS) == [expected] * 2


def test_nothing_is_raised_where_nobody_has_an_error():
    assert run_ranks(2, lambda rank, world: outcome(None), timeout=SECONDS) == [(type(None), "", 2.0)] * 2


def test_the_lowest_rank_speaks_and_other_errors_are_counted():
    def on_rank(rank, world):
        found = [None, RolloutError("first"), RolloutError("first"), LogprobFault("second")][rank]
        return outcome(found)

    expected = (RolloutError, "first\n(and 1 more on other ranks)", 4.0)
    assert run_ranks(4, on_rank, timeout=SECONDS) == [expected] * 4


class Unpicklable(LogprobFault):
    """An exception that cannot travel: its constructor takes no message."""

    def __init__(self) -> None:
        super().__init__("from afar")
        self.hook = lambda: None


@pytest.mark.parametrize(("error", "kind"), [(Unpicklable(), LogprobFault), (KeyError("x"), RuntimeError)])
def test_another_type_arrives_as_the_nearest_known_one(error, kind):
    for result in run_ranks(2, lambda rank, world: outcome(error if rank == 1 else None), timeout=SECONDS):
        assert result == (kind, str(error), 2.0)


def test_the_cause_is_kept_where_it_was_found():
    def on_rank(rank, world):
        error = LogprobFault("nan") if rank == 0 else None
        with pytest.raises(LogprobFault) as caught:
            raise_together(error, dist.group.WORLD)
        return caught.value.__cause__ is error

    assert run_ranks(2, on_rank, timeout=SECONDS) == [True, True]


def test_one_rank_raises_its_own():
    error = RolloutError("mine")
    with pytest.raises(RolloutError) as caught:
        raise_together(error, None)
    assert caught.value is error
    raise_together(None, None)
