"""Counts, metrics and errors over the ranks of the machine."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu import bodies


def test_counts_are_exact_integers(machine):
    """2^24 + 1 has no fp32, 2^31 no int32, 2^53 + 1 no float64."""
    n = machine.ranks
    expected = [n * (2**24 + 1), n * 2**31 + sum(range(n)), n * (2**53 + 1), 0]
    assert machine.run(n, bodies.counts, machine.kind) == [expected] * n


def test_metrics_are_those_of_the_union(machine):
    n = machine.ranks
    expected = bodies.metrics_of(torch.cat([bodies.samples(rank) for rank in range(n)])).compute()
    for reduced, worst in machine.run(n, bodies.metrics, machine.kind):
        assert reduced == pytest.approx(expected, rel=1e-15)
        assert math.isnan(worst), "a NaN of one rank is everybody's"


def test_an_error_of_one_rank_is_raised_by_all(machine):
    assert set(machine.run(machine.ranks, bodies.fault, machine.kind)) == {"prev_logprobs is nan"}
