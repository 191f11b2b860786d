"""The plan: every sequence once, no microbatch over its budget, equal counts, balanced work."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_support.errors import RolloutError
from megatron_support.rollouts.planning import microbatch_shape, pack, padded_row, plan_microbatches, round_up, spread

lengths_of = st.lists(st.integers(2, 60), min_size=1, max_size=40).map(lambda x: torch.tensor(x))


@st.composite
def problems(draw: Any) -> tuple[Tensor, dict[str, Any]]:
    """Lengths with a budget that the longest of them fits into."""
    lengths = draw(lengths_of)
    sequence_multiple = draw(st.sampled_from([1, 2, 4, 8]))
    total_multiple = sequence_multiple * draw(st.sampled_from([1, 2, 3]))
    row = padded_row(lengths, sequence_multiple, total_multiple)
    return lengths, {
        "layout": draw(st.sampled_from(["packed", "padded"])),
        "max_tokens": row + draw(st.integers(0, 200)),
        "data_parallel_size": draw(st.integers(1, 5)),
        "sequence_multiple": sequence_multiple,
        "total_multiple": total_multiple,
        "count_multiple": draw(st.integers(1, 4)),
    }


@given(problems())
def test_every_sequence_is_in_one_microbatch_of_one_rank(problem):
    lengths, arguments = problem
    plan = plan_microbatches(lengths, **arguments)
    assert len(plan) == arguments["data_parallel_size"]
    assert sorted(i for rank in plan for members in rank for i in members.tolist()) == list(range(len(lengths)))
    for members in (m for rank in plan for m in rank):
        assert members.dtype == torch.int64 and members.tolist() == sorted(members.tolist())


@given(problems())
def test_no_microbatch_is_over_the_budget_padding_included(problem):
    lengths, arguments = problem
    multiples = {name: arguments[name] for name in ("layout", "sequence_multiple", "total_multiple")}
    for rank in plan_microbatches(lengths, **arguments):
        rows, width = microbatch_shape(lengths, rank, **multiples)
        assert rows * width <= arguments["max_tokens"]
        assert width % arguments["total_multiple"] == 0
        for members in rank:
            sizes = round_up(lengths[members], arguments["sequence_multiple"])
            if arguments["layout"] == "packed":
                assert rows == 1 and int(sizes.sum()) <= width
            else:
                assert len(members) <= rows and bool((sizes <= width).all())


@given(problems())
def test_ranks_have_equally_many_microbatches(problem):
    lengths, arguments = problem
    plan = plan_microbatches(lengths, **arguments)
    counts = {len(rank) for rank in plan}
    assert len(counts) == 1
    count = counts.pop()
    assert count >= 1 and count % arguments["count_multiple"] == 0
    # no more than the fullest rank needs: a microbatch costs a pass through the pipeline
    assert count - arguments["count_multiple"] < max(
        1, max(int((round_up(lengths, 1)[torch.cat(r)]).numel()) for r in plan)
    )


@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 9))
def test_bins_differ_by_one_item_at_most(sizes, bins):
    """Rounds hand the larger item to the emptier bin, so a difference never grows beyond the first round's largest."""
    found = spread(sizes, bins)
    assert len(found) == bins
    assert sorted(item for members in found for item in members) == list(range(len(sizes)))
    loads = [sum(sizes[item] for item in members) for members in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(0, 200))
def test_packed_bins_hold_every_item_and_no_two_fit_into_one(sizes, more):
    capacity = max(sizes, default=1) + more
    found = pack(sizes, capacity)
    assert sorted(item for members in found for item in members) == list(range(len(sizes)))
    loads = sorted(sum(sizes[item] for item in members) for members in found)
    assert all(0 < load <= capacity for load in loads)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


@given(st.data())
def test_packing_is_within_its_bound_of_the_fewest_bins(data):
    """Bins that are full are cut into pieces, so that the fewest bins are known: best-fit decreasing needs 11/9 + 4."""
    capacity, bins = data.draw(st.integers(10, 100)), data.draw(st.integers(1, 12))
    sizes = []
    for _ in range(bins):
        cuts = data.draw(st.sets(st.integers(1, capacity - 1), max_size=5))
        edges = [0, *sorted(cuts), capacity]
        sizes += [b - a for a, b in pairwise(edges)]
    assert bins <= len(pack(sizes, capacity)) <= bins * 11 / 9 + 4


@given(problems())
def test_a_rank_has_no_more_microbatches_than_its_tokens_need(problem):
    """Without fillers the fullest rank's packing decides, and any two of its bins are over the budget together."""
    lengths, arguments = problem
    plan = plan_microbatches(lengths, **{**arguments, "count_multiple": 1, "layout": "packed"})
    sizes = round_up(lengths, arguments["sequence_multiple"])
    capacity = arguments["max_tokens"] // arguments["total_multiple"] * arguments["total_multiple"]
    most = max(int(sizes[torch.cat(rank)].sum()) for rank in plan)
    assert len(plan[0]) <= max(1, 2 * most / capacity + 1)


def test_one_long_sequence_does_not_thin_out_the_other_microbatches():
    """A sequence fills a microbatch alone; the hundred short ones fit into another."""
    lengths = torch.tensor([100] + [1] * 100)
    plan = plan_microbatches(lengths, max_tokens=100, data_parallel_size=1, layout="packed")
    assert [members.tolist() for members in plan[0]] == [[0], list(range(1, 101))]


@given(problems())
def test_ranks_get_nearly_equal_work(problem):
    lengths, arguments = problem
    plan = plan_microbatches(lengths, **arguments)
    sizes = round_up(lengths, arguments["sequence_multiple"])
    if arguments["layout"] == "padded":
        sizes = torch.full_like(
            lengths, padded_row(lengths, arguments["sequence_multiple"], arguments["total_multiple"])
        )
    work = [int(sizes[torch.cat(rank)].sum()) for rank in plan]
    assert max(work) - min(work) <= int(sizes.max())


def test_a_plan_worked_out_by_hand():
    """Rounds 9, 7 | 5, 4 | 3 over two ranks: rank 0 has 9 + 4, rank 1 has 7 + 5 + 3; in tens: 9 | 4 and 7 | 5 + 3."""
    lengths = torch.tensor([4, 9, 5, 7, 3])
    plan = plan_microbatches(lengths, max_tokens=10, data_parallel_size=2, layout="packed")
    assert [[members.tolist() for members in rank] for rank in plan] == [[[1], [0]], [[3], [2, 4]]]
    # rows of 9, three in a microbatch, dealt in turn
    plan = plan_microbatches(lengths, max_tokens=27, data_parallel_size=1, layout="padded", count_multiple=2)
    assert [[members.tolist() for members in rank] for rank in plan] == [[[0, 2, 4], [1, 3]]]


def test_a_rank_without_sequences_has_fillers():
    plan = plan_microbatches(torch.tensor([5]), max_tokens=8, data_parallel_size=2, layout="packed", count_multiple=2)
    assert [[members.tolist() for members in rank] for rank in plan] == [[[0], []], [[], []]]
    assert microbatch_shape(torch.tensor([5]), plan[1], layout="packed", total_multiple=4) == (1, 4)
    assert microbatch_shape(torch.tensor([5]), plan[1], layout="padded", total_multiple=4) == (1, 8)


def test_a_minibatch_without_sequences_is_one_filler_a_rank():
    for layout in ("packed", "padded"):
        plan = plan_microbatches(
            torch.zeros(0, dtype=torch.int64), max_tokens=4, data_parallel_size=2, layout=layout, total_multiple=8
        )
        assert [[members.tolist() for members in rank] for rank in plan] == [[[]], [[]]]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_sequences_over_the_budget_are_named(layout):
    lengths = torch.tensor([4, 9, 12])
    arguments: dict[str, Any] = {"data_parallel_size": 1, "layout": layout, "sample_ids": ("a", "b", "c")}
    with pytest.raises(RolloutError) as caught:
        plan_microbatches(lengths, max_tokens=10, **arguments)
    text = str(caught.value)
    assert "max_tokens=10" in text and "12 needed" in text and "c (12 tokens)" in text
    assert "raise train.microbatch.max_tokens, set train.microbatch.truncate, or drop the sequences" in text
    assert ("b (9 tokens)" in text) == (layout == "padded")  # a padded row is as wide as the longest
    plan_microbatches(lengths, max_tokens=12, **arguments)


def test_padding_counts_and_many_names_are_cut_short():
    with pytest.raises(RolloutError, match=r"max_tokens=9 \(padding included, 16 needed\), got #0 \(9 tokens\)"):
        plan_microbatches(torch.tensor([9]), max_tokens=9, data_parallel_size=1, layout="packed", sequence_multiple=16)
    with pytest.raises(RolloutError, match=r"#4 .* and 95 more; raise"):
        plan_microbatches(torch.full((100,), 9), max_tokens=8, data_parallel_size=1, layout="packed")


def test_equal_arguments_give_equal_plans():
    """Ranks plan by themselves: nothing but the arguments may decide."""
    lengths = torch.randint(2, 50, (200,), generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {"max_tokens": 128, "data_parallel_size": 3, "layout": "packed"}
    first, second = plan_microbatches(lengths, **arguments), plan_microbatches(lengths.clone(), **arguments)
    assert [[m.tolist() for m in r] for r in first] == [[m.tolist() for m in r] for r in second]
