"""Microbatches: the shift by one stays inside a sequence, and every layout holds every token once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_support.errors import ConfigurationError
from megatron_support.rollouts import RolloutBatch
from megatron_support.rollouts.microbatch import build_microbatch, context_positions
from megatron_support.rollouts.planning import microbatch_shape, plan_microbatches
from megatron_support.types import TokenBatch
from tests.rollout_batch import COLUMNS, make_rollouts

lengths_of = st.lists(st.integers(2, 17), min_size=1, max_size=9)
layouts = st.sampled_from(["packed", "padded"])


def build(rollouts: RolloutBatch, indices: Any, *, layout: str, context_size: int = 1, **changes: Any):
    """The microbatch of ``indices`` on every context-parallel rank."""
    indices = torch.as_tensor(indices, dtype=torch.int64)
    multiple = 1 if context_size == 1 else 2 * context_size
    multiples: dict[str, Any] = {"layout": layout, "sequence_multiple": multiple}
    shape = microbatch_shape(rollouts.lengths, [indices], total_multiple=multiple, **multiples)
    arguments = {"pad_to": shape, "columns": COLUMNS, "context_size": context_size, **multiples, **changes}
    return [build_microbatch(rollouts, indices, context_rank=rank, **arguments) for rank in range(context_size)]


def test_packed_targets_are_next_tokens_of_their_own_sequence():
    """C18: packed [10, 11, 12 | 20, 21] predicts 11, 12, nothing, 21, nothing."""
    rollouts = make_rollouts([3, 2], tokens=torch.tensor([10, 11, 12, 20, 21]))
    (packed,) = build(rollouts, [0, 1], layout="packed")
    assert packed.input_ids.tolist() == [[10, 11, 12, 20, 21]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.targets.tolist() == [11, 12, -1, 21, -1]
    assert packed.token_index.tolist() == [1, 2, -1, 4, -1]
    assert packed.response_mask.tolist() == [True, True, False, True, False]
    assert packed.sequence_ids.tolist() == [0, 0, 0, 1, 0]
    assert packed.cu_seqlens.tolist() == [0, 3, 5] and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 3 and packed.packed and packed.num_sequences == 2
    (swapped,) = build(rollouts, [1, 0], layout="packed")
    assert swapped.cu_seqlens.tolist() == [0, 2, 5] and swapped.max_seqlen == 3


def test_padded_rows_hold_one_sequence_each():
    rollouts = make_rollouts([3, 2], tokens=torch.tensor([10, 11, 12, 20, 21]))
    (padded,) = build(rollouts, [1, 0], layout="padded")
    assert padded.input_ids.tolist() == [[20, 21, 0], [10, 11, 12]]
    assert padded.position_ids.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert padded.targets.tolist() == [21, -1, -1, 11, 12, -1]
    assert padded.sequence_ids.tolist() == [1, 0, 0, 0, 0, 0]
    assert padded.cu_seqlens is None and padded.max_seqlen is None and not padded.packed


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("context_size", [1, 2])
def test_a_token_of_one_sequence_leaves_the_others_alone(layout, context_size):
    """C18: after changing token 20, every entry about the first sequence is identical."""
    before = make_rollouts([5, 4, 6])
    start, end = before.cu_seqlens[1:3].tolist()
    tokens = before.tokens.index_fill(0, torch.arange(start, end), 7)
    columns = {name: getattr(before, name).clone() for name in COLUMNS}
    for column in columns.values():
        column[start:end] = torch.nan
    after = before.with_columns(tokens=tokens, **columns)
    pairs = zip(
        build(before, [0, 1, 2], layout=layout, context_size=context_size),
        build(after, [0, 1, 2], layout=layout, context_size=context_size),
        strict=True,
    )
    for one, other in pairs:
        theirs = (one.token_index >= start) & (one.token_index < end)
        others = (one.input_ids < 100 + start) | (one.input_ids >= 100 + end)
        assert torch.equal(one.targets[~theirs], other.targets[~theirs])
        assert torch.equal(one.input_ids[others], other.input_ids[others])
        for name in COLUMNS:
            assert torch.equal(one.columns[name][~theirs], other.columns[name][~theirs])
            assert bool(other.columns[name][theirs].isnan().all())


def scatter(batches: list[TokenBatch], values: list[Tensor], total: int) -> tuple[Tensor, Tensor]:
    """Values put back by token index, and how often each token got one."""
    result, seen = torch.zeros(total, dtype=values[0].dtype), torch.zeros(total, dtype=torch.int64)
    for batch, value in zip(batches, values, strict=True):
        has_target = batch.token_index >= 0
        result[batch.token_index[has_target]] = value[has_target]
        seen.index_add_(0, batch.token_index[has_target], torch.ones_like(batch.token_index[has_target]))
    return result, seen


@settings(max_examples=40)
@given(lengths_of, layouts, st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.integers(24, 120))
def test_every_token_is_predicted_once_over_all_ranks(lengths, layout, context_size, data_size, count_multiple, budget):
    """What is planned and built for all data x context ranks and put back by index is the batch itself."""
    rollouts = make_rollouts(lengths)
    multiple = 1 if context_size == 1 else 2 * context_size
    multiples: dict[str, Any] = {"layout": layout, "sequence_multiple": multiple}
    plan = plan_microbatches(
        rollouts.lengths,
        max_tokens=budget,
        data_parallel_size=data_size,
        total_multiple=multiple,
        count_multiple=count_multiple,
        **multiples,
    )
    batches = []
    for rank in plan:
        shape = microbatch_shape(rollouts.lengths, rank, total_multiple=multiple, **multiples)
        for members in rank:
            batches += build(rollouts, members, layout=layout, context_size=context_size, pad_to=shape)
    total = int(rollouts.cu_seqlens[-1])
    first = rollouts.cu_seqlens[:-1]
    expected = torch.ones(total, dtype=torch.int64).index_fill(0, first, 0)  # nothing predicts a first token
    targets, seen = scatter(batches, [b.targets for b in batches], total)
    assert torch.equal(seen, expected)
    assert torch.equal(targets, rollouts.tokens.index_fill(0, first, 0))
    assert sum(int(b.response_mask.sum()) for b in batches) == int(rollouts.response_mask.sum())
    sequences, _ = scatter(batches, [b.sequence_ids for b in batches], total)
    assert torch.equal(sequences[expected > 0], rollouts.sequence_ids[expected > 0])
    for name in COLUMNS:
        column, _ = scatter(batches, [b.columns[name] for b in batches], total)
        assert torch.equal(column, getattr(rollouts, name))


@settings(max_examples=50)
@given(lengths_of, layouts, st.sampled_from([1, 2, 4]))
def test_an_entry_is_about_the_token_behind_its_input(lengths, layout, context_size):
    """Token n is 100 + n, so the input before target t is t - 1, also at the borders of context-parallel shards."""
    rollouts = make_rollouts(lengths)
    for batch in build(rollouts, torch.arange(len(lengths)), layout=layout, context_size=context_size):
        valid = batch.targets >= 0
        assert torch.equal(batch.input_ids.flatten()[valid], batch.targets[valid] - 1)
        assert torch.equal(batch.token_index[valid], batch.targets[valid] - 100)
        starts = rollouts.cu_seqlens[batch.sequence_ids[valid]]
        assert torch.equal(batch.position_ids.flatten()[valid], batch.token_index[valid] - 1 - starts)
        assert not batch.response_mask[~valid].any() and not batch.sequence_ids[~valid].any()
        assert bool((batch.token_index[~valid] == -1).all())
        for name in COLUMNS:
            assert torch.equal(batch.columns[name][valid], getattr(rollouts, name)[batch.token_index[valid]])
            assert not batch.columns[name][~valid].any()


@settings(max_examples=50)
@given(lengths_of, layouts, st.sampled_from([2, 4]))
def test_context_shards_reassemble(lengths, layout, context_size):
    rollouts = make_rollouts(lengths)
    indices = torch.arange(len(lengths))
    shards = build(rollouts, indices, layout=layout, context_size=context_size)
    multiple = 2 * context_size
    shape = (shards[0].input_ids.shape[0], shards[0].input_ids.shape[1] * context_size)
    (whole,) = build(rollouts, indices, layout=layout, pad_to=shape, sequence_multiple=multiple)
    if whole.packed:
        segments = whole.cu_seqlens.diff().long()
        assert all(torch.equal(s.cu_seqlens, whole.cu_seqlens) for s in shards)  # boundaries before the split
    else:
        segments = torch.full((shape[0],), shape[1])
    places = [context_positions(segments, context_size, rank) for rank in range(context_size)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(whole.targets.numel()))
    for name in ("input_ids", "position_ids", "targets", "response_mask", "sequence_ids", "token_index"):
        expected = getattr(whole, name).flatten()
        for place, shard in zip(places, shards, strict=True):
            assert torch.equal(getattr(shard, name).flatten(), expected[place])


def test_context_ranks_hold_a_chunk_from_either_end():
    """Eight tokens over two ranks: chunks 0 and 3, then 1 and 2; causal attention costs both the same."""
    segments = torch.tensor([8, 4])
    assert context_positions(segments, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_positions(segments, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert context_positions(segments, 1, 0).tolist() == list(range(12))
    with pytest.raises(ConfigurationError, match="multiple of 4"):
        context_positions(torch.tensor([6]), 2, 0)


@given(lengths_of, st.sampled_from([1, 4, 8]))
def test_unpacking_gives_the_sequences_back(lengths, multiple):
    rollouts = make_rollouts(lengths)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(len(lengths)))
    (packed,) = build(rollouts, order, layout="packed", sequence_multiple=multiple, pad_to=(1, 400))
    starts = packed.cu_seqlens.tolist()
    assert starts[0] == 0 and starts[-1] == 400
    for place, s in enumerate(order.tolist()):
        begin, length = starts[place], lengths[s]
        own = slice(*rollouts.cu_seqlens[s : s + 2].tolist())
        assert starts[place + 1] - begin == -(-length // multiple) * multiple
        assert torch.equal(packed.input_ids[0, begin : begin + length], rollouts.tokens[own])
        assert not packed.input_ids[0, begin + length : starts[place + 1]].any()


@given(lengths_of)
def test_padded_and_packed_say_the_same(lengths):
    rollouts = make_rollouts(lengths, support=True)
    indices = torch.arange(len(lengths))
    (packed,), (padded,) = (build(rollouts, indices, layout=layout) for layout in ("packed", "padded"))
    p, q = packed.token_index >= 0, padded.token_index >= 0
    for name in ("targets", "token_index", "response_mask", "sequence_ids"):
        assert torch.equal(getattr(packed, name)[p], getattr(padded, name)[q])
    for name in COLUMNS:
        assert torch.equal(packed.columns[name][p], padded.columns[name][q])
    assert torch.equal(packed.support.token_ids, padded.support.token_ids)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("context_size", [1, 2])
def test_support_is_that_of_the_target(layout, context_size):
    rollouts = make_rollouts([5, 4, 6], prompt=2, support=True)
    for batch in build(rollouts, [2, 0], layout=layout, context_size=context_size):
        offsets = batch.support.offsets
        assert offsets.numel() == batch.targets.numel() + 1 and int(offsets[-1]) == batch.support.token_ids.numel()
        for j, target in enumerate(batch.targets.tolist()):
            kept = batch.support.token_ids[offsets[j] : offsets[j + 1]].tolist()
            count = (target - 100) % 3 + 1 if batch.response_mask[j] else 0
            assert kept == [target + 1000 * i for i in range(count)]


def test_sampling_is_numbers_where_all_sequences_agree():
    rollouts = make_rollouts([3, 4])
    (batch,) = build(rollouts, [1], layout="packed")
    assert (batch.sampling.temperature, batch.sampling.top_k, batch.sampling.top_p) == (0.7, 40, 0.9)
    (batch,) = build(rollouts.without_filters(), [1], layout="packed")
    assert (batch.sampling.temperature, batch.sampling.top_k, batch.sampling.top_p) == (0.7, None, 1.0)
    assert not batch.sampling.filters


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_mixed_sampling_is_that_of_the_targets_sequence(layout):
    mixed: dict[str, Any] = {
        "temperature": torch.tensor([0.5, 1.0, 2.0]),
        "top_k": torch.tensor([0, 7, 3]),
        "top_p": torch.tensor([1.0, 0.5, 0.25]),
    }
    rollouts = make_rollouts([3, 2, 4], **mixed)
    # the rule is one for the whole minibatch: a microbatch whose sequences agree has tensors too, as all ranks do
    for indices in ([2, 0], [1]):
        (batch,) = build(rollouts, indices, layout=layout)
        valid = batch.targets >= 0
        for name, off in (("temperature", 1), ("top_k", 0), ("top_p", 1)):
            value = getattr(batch.sampling, name)
            assert value.dtype == mixed[name].dtype
            assert torch.equal(value[valid], mixed[name][batch.sequence_ids[valid]])
            assert bool((value[~valid] == off).all())


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("context_size", [1, 2])
def test_a_filler_has_the_shape_of_the_others_and_no_target(layout, context_size):
    rollouts = make_rollouts([5, 4], support=True)
    rows, width = (1, 12) if layout == "packed" else (2, 8)
    for batch in build(rollouts, [], layout=layout, context_size=context_size, pad_to=(rows, width)):
        assert batch.input_ids.shape == (rows, width // context_size)
        assert bool((batch.targets == -1).all()) and not batch.response_mask.any()
        assert batch.support.offsets.tolist() == [0] * (rows * width // context_size + 1)
        assert batch.num_sequences == 2
        if layout == "packed":
            assert batch.cu_seqlens.tolist() == [0, 12] and batch.max_seqlen == 12


def test_a_masked_sequence_keeps_its_response():
    """sample_mask is per sequence and applied in the loss; the microbatch says what is a response."""
    rollouts = make_rollouts([3, 3], sample_mask=torch.tensor([False, True]))
    (batch,) = build(rollouts, [0, 1], layout="packed")
    assert int(batch.response_mask.sum()) == 4
