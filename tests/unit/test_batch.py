"""RolloutBatch: sequences chosen, columns replaced, sizes checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_support.errors import RolloutError
from megatron_support.rollouts.batch import PER_SEQUENCE, PER_TOKEN, ragged_arange, select_support
from megatron_support.types import RolloutSupport
from tests.rollout_batch import assert_same, make_rollouts


def test_every_field_is_per_token_or_per_sequence():
    """``select`` and the size check go by these two lists: a field in neither would be cut wrongly."""
    fields = {f.name for f in dataclasses.fields(make_rollouts([2]))}
    assert fields == {*PER_TOKEN, *PER_SEQUENCE, "cu_seqlens", "support", "unknown_fields"}


@given(st.data())
def test_selected_sequences_keep_all_that_is_theirs(data):
    lengths = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=6))
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))  # in any order, also twice
    rollouts = make_rollouts(lengths, support=True, reward_components=torch.arange(2.0 * len(lengths)).view(-1, 2))
    chosen = rollouts.select(torch.tensor(indices, dtype=torch.int64))
    assert chosen.num_sequences == len(indices)
    for new, old in enumerate(indices):
        a, b = chosen.cu_seqlens[new : new + 2].tolist()
        c, d = rollouts.cu_seqlens[old : old + 2].tolist()
        for name in PER_TOKEN:
            value = getattr(rollouts, name)
            assert (getattr(chosen, name) is None) == (value is None)
            assert value is None or torch.equal(getattr(chosen, name)[a:b], value[c:d]), name
        for name in PER_SEQUENCE:
            left, right = getattr(chosen, name), getattr(rollouts, name)
            same = torch.equal(left[new], right[old]) if isinstance(right, Tensor) else left[new] == right[old]
            assert same, name
        assert kept_sets(chosen.support, a, b) == kept_sets(rollouts.support, c, d)


def kept_sets(support: RolloutSupport | None, start: int, end: int) -> list[list[int]]:
    assert support is not None
    offsets = support.offsets.tolist()
    return [support.token_ids[offsets[t] : offsets[t + 1]].tolist() for t in range(start, end)]


def test_selecting_all_is_the_identity_and_selections_compose():
    rollouts = make_rollouts([3, 2, 5, 4], support=True)
    assert_same(rollouts.select(torch.arange(4)), rollouts)
    once = rollouts.select(torch.tensor([3, 1, 0])).select(torch.tensor([2, 0]))
    assert_same(once, rollouts.select(torch.tensor([0, 3])))


def test_columns_are_replaced_in_a_copy():
    rollouts: Any = make_rollouts([3, 2])
    changed: Any = rollouts.with_columns(values=torch.arange(5.0), prompts=None)
    assert changed.values.tolist() == [0, 1, 2, 3, 4] and changed.prompts is None
    assert rollouts.values.tolist() != changed.values.tolist() and rollouts.prompts is not None
    with pytest.raises(RolloutError, match="values must have 5 entries, one for each token, got 4"):
        rollouts.with_columns(values=torch.zeros(4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollouts.values = None


def test_filtering_is_a_fact_of_each_sequence():
    mixed: dict[str, Any] = {"top_k": torch.tensor([0, 5, 0]), "top_p": torch.tensor([1.0, 1.0, 0.9])}
    assert make_rollouts([2, 2, 2], **mixed).filtering.tolist() == [False, True, True]
    assert make_rollouts([2, 2, 2], support=True, **mixed).filtering.tolist() == [True] * 3


def test_without_filters_every_token_is_inside_and_the_temperature_stays():
    rollouts = make_rollouts([3, 2], support=True)
    free = rollouts.without_filters()
    assert not free.filtering.any() and free.support is None
    assert torch.equal(free.temperature, rollouts.temperature)
    assert torch.equal(free.tokens, rollouts.tokens) and bool(rollouts.filtering.all())


def test_lengths_and_sequence_ids():
    rollouts = make_rollouts([3, 2, 4])
    assert rollouts.lengths.tolist() == [3, 2, 4]
    assert rollouts.sequence_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"tokens": torch.zeros(4, dtype=torch.int64)}, "tokens must have 5 entries, one for each token, got 4"),
    "mask": ({"response_mask": torch.zeros(6, dtype=torch.bool)}, "response_mask must have 5 entries"),
    "prev": ({"prev_logprobs": torch.zeros(0)}, "prev_logprobs must have 5 entries"),
    "rewards": ({"rewards": torch.zeros(3)}, "rewards must have 2 entries, one for each sequence, got 3"),
    "ids": ({"sample_ids": ("a",)}, "sample_ids must have 2 entries"),
    "prompts": ({"prompts": ("a", "b", "c")}, "prompts must have 2 entries"),
    "components": ({"reward_components": torch.zeros(5, 2)}, "reward_components must have 2 entries"),
    "start": ({"cu_seqlens": torch.tensor([1, 3, 5])}, "cu_seqlens must ascend from 0"),
    "order": ({"cu_seqlens": torch.tensor([0, 6, 5])}, "cu_seqlens must ascend from 0"),
    "empty": ({"cu_seqlens": torch.tensor([0, 5, 5])}, "every sequence with at least one token"),
    "support": (
        {"support": RolloutSupport(torch.zeros(0, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))},
        "support.offsets must have 6 entries, one more than tokens, got 5",
    ),
    "bf16": (
        {"values": torch.zeros(5, dtype=torch.bfloat16)},
        "values must be a tensor on the CPU, detached, in fp32, int64 or bool, got torch.bfloat16 on cpu; pass",
    ),
    "gradient": (
        {"advantages": torch.zeros(5, requires_grad=True)},
        "got torch.float32 on cpu, with gradient; pass advantages.detach()",
    ),
    "shape": (
        {"advantages": torch.zeros(5, 2)},
        "advantages must have one number for each token, got shape (5, 2); flatten it",
    ),
    "device": ({"rewards": torch.zeros(2, device="meta")}, "rewards must be a tensor on the CPU"),
    "response first": (
        {"response_mask": torch.tensor([False, True, True, True, True])},
        "the first token of sample 's1' must not be a response token; add a prompt token",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_tensors_are_named(fault):
    changes, message = WRONG[fault]
    with pytest.raises(RolloutError) as caught:
        make_rollouts([3, 2]).with_columns(**changes)
    assert message in str(caught.value)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=8))
def test_ragged_arange_is_the_loop(pairs):
    starts, lengths = (torch.tensor([p[i] for p in pairs], dtype=torch.int64) for i in (0, 1))
    assert ragged_arange(starts, lengths).tolist() == [s + i for s, n in pairs for i in range(n)]


def test_a_token_that_is_not_there_has_an_empty_set():
    support = RolloutSupport(torch.tensor([4, 5, 6]), torch.tensor([0, 2, 2, 3]))
    chosen = select_support(support, torch.tensor([2, -1, 0, 1]))
    assert chosen.token_ids.tolist() == [6, 4, 5]
    assert chosen.offsets.tolist() == [0, 1, 1, 3, 3]
