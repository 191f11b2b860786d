"""Metrics of all ranks reduce to the metric of the union, or fail on every rank alike."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_support.distributed.metrics import reduce_metrics
from megatron_support.metrics import EffectiveSampleSize, Max, Mean, MetricSet, Min, Sum
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def metrics_of(values: list[float]) -> MetricSet:
    """All kinds of metrics of some samples; of none at all too."""
    x = torch.tensor(values, dtype=torch.float64)
    return MetricSet(
        {
            "count": Sum(x.numel()),
            "mean": Mean(x.sum(), x.numel(), per="token"),
            "low": Min(x.min() if values else math.inf),
            "high": Max(x.max() if values else -math.inf),
            "weights": EffectiveSampleSize(x.sum(), x.square().sum(), x.numel()),
        }
    )


@pytest.mark.parametrize("parts", [[[1.0, 2.0], [3.0, 10.0, 5.0]], [[], [2.0, -4.0]], [[1.5], [], [-2.0, 7.0]]])
def test_the_reduction_is_the_metric_of_the_union(parts):
    def on_rank(rank, world):
        return reduce_metrics(metrics_of(parts[rank]), dist.group.WORLD, CPU).compute()

    expected = metrics_of([x for part in parts for x in part]).compute()
    for result in run_ranks(len(parts), on_rank):
        assert result == pytest.approx(expected, rel=1e-15)


def test_a_rank_with_excluded_tokens_only_reports_the_same_names():
    """C2: gen [-1.1, -.7, -2], prev [-1, -inf, -2]; the -inf token is alone on rank 0. Mean |d| .05, e^|d| 1.052585."""
    generation, previous = [[-0.7], [-1.1, -2.0]], [[-math.inf], [-1.0, -2.0]]

    def on_rank(rank, world):
        g, p = torch.tensor(generation[rank]), torch.tensor(previous[rank])
        inside = p > -math.inf
        difference = torch.where(inside, p - g, 0.0).abs()
        error = torch.where(inside, difference.exp(), 0.0)
        local = MetricSet(
            {
                "difference": Mean(difference.sum(), inside.sum()),
                "token_mult_prob_error": Mean(error.sum(), inside.sum()),
                "excluded": Sum((~inside).sum()),
            }
        )
        return reduce_metrics(local, dist.group.WORLD, CPU).compute()

    expected = {"difference": 0.05, "token_mult_prob_error": 1.052585, "excluded": 1}
    for result in run_ranks(2, on_rank):
        assert result == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "others",
    [
        {"a": Sum(1), "b": Sum(2)},  # one more, so that the vectors' lengths differ
        {"b": Sum(1)},
        {"a": Mean(1.0, 1)},  # same name, other kind
        {"a": Max(1.0)},  # none to sum
        {str(i): Max(1.0) for i in range(300)},  # more maxima than one collective carries
        {},
    ],
)
def test_ranks_with_different_metrics_fail_alike_and_do_not_hang(others):
    def on_rank(rank, world):
        local = MetricSet({"a": Sum(1)} if rank == 0 else others)
        with pytest.raises(RuntimeError) as caught:
            reduce_metrics(local, dist.group.WORLD, CPU)
        # the group is still in step: a collective after the error works
        total = torch.ones(1)
        dist.all_reduce(total)
        return str(caught.value), total.item()

    for rank, (message, total) in enumerate(run_ranks(2, on_rank, timeout=30.0)):
        names = ["a"] if rank == 0 else sorted(others)
        assert message.startswith(f"ranks hold different metrics; this rank has {names}")
        assert "report a metric with count 0" in message
        assert total == 2


@pytest.mark.parametrize(("each", "sizes"), [(0, [258, 0]), (20, [258, 60]), (200, [258, 144, 600])])
def test_one_collective_of_a_kind_whatever_the_number_of_metrics(monkeypatch, each, sizes):
    """MAX of a fixed size with the checksum, and SUM with which maximum is NaN; 144 of 400 maxima go by themselves."""

    def on_rank(rank, world):
        calls = []
        original = dist.all_reduce

        def counting(tensor, op=dist.ReduceOp.SUM, group=None):
            calls.append(tensor.numel())
            return original(tensor, op, group=group)

        monkeypatch.setattr(dist, "all_reduce", counting)
        local = {f"{kind.__name__}{i}": kind(i + rank) for kind in (Sum, Min, Max) for i in range(each)}
        reduced = reduce_metrics(MetricSet(local), dist.group.WORLD, CPU).compute()
        expected = {"Sum": lambda i: 2.0 * i + 1, "Min": float, "Max": lambda i: i + 1.0}
        wrong = [name for name, value in reduced.items() if value != expected[name[:3]](int(name[3:]))]
        return calls, wrong

    assert run_ranks(2, on_rank) == [(sizes, [])] * 2


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_nan_is_not_lost(culprit):
    def on_rank(rank, world):
        value = math.nan if rank == culprit else 1.0
        local = MetricSet({"sum": Sum(value), "mean": Mean(value, 1), "high": Max(value), "low": Min(value)})
        return reduce_metrics(local, dist.group.WORLD, CPU).compute()

    for result in run_ranks(3, on_rank):
        assert all(math.isnan(value) for value in result.values()), result


def test_one_rank_keeps_its_metrics():
    metrics = metrics_of([1.0, 2.0])
    assert reduce_metrics(metrics, None, CPU) is metrics
