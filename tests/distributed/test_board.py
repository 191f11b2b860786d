"""An exception on one rank becomes that of all ranks, in seconds, whatever the others wait for."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron_support.distributed.board import one_error
from megatron_support.errors import PeerError, RolloutError
from tests.ranks import RanksFailed, run_ranks

SOON = 20.0
"""Seconds; the process group itself would wait for minutes."""


def fails_alone(rank, world, error, waits):
    """(type, message, whether another rank speaks, seconds) of what leaves the block."""
    dist.barrier()  # a rank that leaves sooner breaks the others' rendezvous
    start = time.monotonic()
    try:
        with one_error(grace=5.0):
            if rank == world - 1:
                raise error
            waits()
    except Exception as found:
        dist.destroy_process_group()  # as a process that ends does
        return type(found), str(found), found.spoken, time.monotonic() - start
    raise AssertionError("nothing was raised")


WAITS = {
    "collective": lambda: dist.all_reduce(torch.ones(1)),
    "receive": lambda: dist.recv(torch.ones(1), src=dist.get_world_size() - 1),
    "barrier": lambda: dist.barrier(),
}


@pytest.mark.parametrize("waits", WAITS)
def test_others_end_with_the_message_of_the_rank_that_failed(waits):
    results = run_ranks(3, fails_alone, RolloutError("file.jsonl:3: reward: missing"), WAITS[waits], timeout=60)
    assert {(kind, message) for kind, message, _, _ in results} == {(RolloutError, "file.jsonl:3: reward: missing")}
    assert [spoken for _, _, spoken, _ in results] == [True, True, False], "one rank tells the user"
    assert max(seconds for *_, seconds in results) < SOON


def test_an_exception_from_elsewhere_stays_what_it_is_where_it_happened():
    results = run_ranks(2, fails_alone, ZeroDivisionError("of a reward"), WAITS["collective"], timeout=60)
    (peer, message, spoken, _), (own, _, own_spoken, _) = results
    assert (peer, message, spoken) == (PeerError, "rank 1: of a reward", True)
    assert (own, own_spoken) == (ZeroDivisionError, False)


def test_sys_exit_on_one_rank_is_an_error_on_all():
    results = run_ranks(2, fails_alone, SystemExit(0), WAITS["collective"], timeout=60)
    (peer, message, spoken, _), (own, own_message, own_spoken, _) = results
    assert (peer, spoken) == (PeerError, True) and message == f"rank 1: {own_message}"
    assert (own, own_spoken) == (RuntimeError, False) and "called sys.exit(0)" in own_message


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def fails_without_a_text(rank, world):
    try:
        with one_error(grace=5.0):
            if rank == 1:
                raise Unspeakable
            dist.all_reduce(torch.ones(1))
    except Exception as found:
        dist.destroy_process_group()
        return str(found) if rank == 0 else type(found).__name__


def test_an_exception_without_a_text_is_posted_too():
    peer, own = run_ranks(2, fails_without_a_text, timeout=60)
    assert (peer, own) == ("rank 1: Unspeakable, whose text cannot be made (KeyError)", "Unspeakable")


def sleeps(rank, world):
    with one_error(grace=1.0):
        if rank == 1:
            raise RolloutError("broken")
        time.sleep(300)


def test_a_rank_that_does_not_notice_is_ended():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"exit codes \[70, 1\]"):
        run_ranks(2, sleeps, timeout=120)
    assert time.monotonic() - start < SOON


def two_blocks(rank, world):
    with one_error():
        dist.barrier()
    try:
        with one_error():
            raise RolloutError(f"second block, rank {rank}")
    except RolloutError as error:
        return str(error), error.spoken


def test_a_block_without_an_error_leaves_nothing_behind_and_the_first_of_several_wins():
    results = run_ranks(2, two_blocks, timeout=60)
    assert len({message for message, _ in results}) == 1 and "second block" in results[0][0]
    assert sorted(spoken for _, spoken in results) == [False, True]


def alone(rank, world):
    with pytest.raises(ZeroDivisionError), one_error():
        raise ZeroDivisionError
    return True


def test_one_rank_raises_its_own():
    assert run_ranks(1, alone, timeout=60) == [True]
