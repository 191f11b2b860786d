"""Metrics reduce by their own rule, over microbatches and through packed vectors alike."""

from __future__ import annotations

import pytest
import torch

from megatron_support.metrics import EffectiveSampleSize, Max, Mean, MetricSet, Min, Sum


def example(shift: float) -> MetricSet:
    return MetricSet(
        {
            "sum": Sum(torch.tensor(1.0 + shift)),
            "mean": Mean(torch.tensor(4.0 * shift), torch.tensor(2 + int(shift)), per="token"),
            "low": Min(torch.tensor(3.0 - shift)),
            "high": Max(3.0 + shift),
            "weights": EffectiveSampleSize(torch.tensor(1.0 + 2 * shift), 1.0 + 8 * shift, 1),
        }
    )


# shift 0 and 1: sums 1 + 2; mean (0 + 4) / (2 + 3); extremes 2 and 4; weights 1 and 3: 16 / (2 * 10).
MERGED = {"sum": 3.0, "mean": 0.8, "low": 2.0, "high": 4.0, "weights": 0.8}


def test_merging_sums_totals_and_counts():
    assert example(0).merge(example(1)).compute() == pytest.approx(MERGED)


def test_two_vectors_reduce_every_metric():
    first, second = example(0), example(1)
    (sums, maxima), (other_sums, other_maxima) = first.pack(), second.pack()
    reduced = first.unpack(sums + other_sums, torch.maximum(maxima, other_maxima))
    assert reduced.compute() == pytest.approx(MERGED)
    assert reduced["mean"].per == "token"


def test_a_name_of_one_side_is_kept():
    assert MetricSet({"a": Sum(1)}).merge(MetricSet({"b": Sum(2)})).compute() == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match=r"metric \['a'\] is defined twice"):
        MetricSet({"a": Sum(1)}) | {"a": Sum(2)}


def test_nothing_seen_is_zero():
    nothing = MetricSet(
        {"m": Mean(0.0, 0), "l": Min(torch.inf), "h": Max(-torch.inf), "e": EffectiveSampleSize(0.0, 0.0, 0)}
    )
    assert set(nothing.compute().values()) == {0.0}
    assert nothing.merge(MetricSet({"l": Min(2.0), "h": Max(-2.0)})).compute() == {"m": 0, "l": 2, "h": -2, "e": 0}
