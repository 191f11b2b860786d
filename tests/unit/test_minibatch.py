"""Minibatches: each sequence in one optimizer step of an epoch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_support.config.recipe import MicrobatchConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.minibatch import prepare_minibatch
from megatron_support.rollouts.minibatch import split_minibatches
from tests.rollout_batch import make_rollouts


@given(st.data())
def test_each_sequence_is_in_one_minibatch(data):
    sequences = data.draw(st.integers(1, 50))
    minibatches = data.draw(st.integers(1, sequences))
    parts = split_minibatches(sequences, minibatches, seed=data.draw(st.none() | st.integers(0, 2**40)))
    assert torch.cat(parts).sort().values.tolist() == list(range(sequences))
    sizes = [len(part) for part in parts]
    assert len(sizes) == minibatches and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_the_order_is_kept_without_a_seed():
    assert [part.tolist() for part in split_minibatches(5, 2)] == [[0, 1, 2], [3, 4]]


def test_a_seed_decides_the_order_and_nothing_else_does():
    """Ranks shuffle by themselves, whatever their global generators hold."""
    torch.manual_seed(1)
    first = torch.cat(split_minibatches(100, 3, seed=7))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = torch.cat(split_minibatches(100, 3, seed=7))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, torch.cat(split_minibatches(100, 3, seed=8)))
    assert first.tolist() != list(range(100))


@pytest.mark.parametrize("minibatches", [0, -1, 4])
def test_more_minibatches_than_sequences_are_refused(minibatches):
    with pytest.raises(ConfigurationError) as caught:
        split_minibatches(3, minibatches)
    assert f"from 1 to the number of sequences of a step (3), got {minibatches}" in str(caught.value)
    assert "lower train.minibatches" in str(caught.value)


def test_counts_are_of_valid_sequences_and_their_response_tokens():
    """Responses of 3, 2, 0, 4, 1 tokens; the second sequence is masked; rewards 0, 1, 1, 1, -1."""
    rollouts = make_rollouts(
        [4, 3, 1, 5, 2],
        sample_mask=torch.tensor([True, False, True, True, True]),
        rewards=torch.tensor([0.0, 1, 1, 1, -1]),
    )
    config = MicrobatchConfig.from_dict({"max_tokens": 8, "layout": "padded"})
    device = torch.device("cpu")
    minibatch = prepare_minibatch(rollouts, microbatch=config, groups=ParallelGroups(), device=device)
    assert minibatch.valid_tokens == 3 + 4 + 1
    assert minibatch.valid_sequences == 3
    assert minibatch.positive_tokens == 4
    assert minibatch.padded_tokens == len(minibatch) * minibatch.micro_batch_size * minibatch.seq_length
