"""Sequences longer than the token budget: cut at the budget where the recipe says so."""

import pytest
import torch

from megatron_support.config.recipe import MicrobatchConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.minibatch import truncate_rollouts
from tests.rollout_batch import assert_same, make_rollouts


def test_the_first_tokens_of_a_long_sequence_stay():
    """Lengths 6, 3 and 4 under a budget of 4, prompts of 2: tokens 4 and 5 of the first sequence go, nothing else."""
    rollouts = make_rollouts([6, 3, 4], prompt=2, support=True)
    cut, count = truncate_rollouts(rollouts, MicrobatchConfig(max_tokens=4, truncate=True), total_multiple=1)
    assert count == 1
    assert cut.cu_seqlens.tolist() == [0, 4, 7, 11]
    assert cut.tokens.tolist() == [100, 101, 102, 103, 106, 107, 108, 109, 110, 111, 112]
    assert cut.response_mask.tolist() == [bool(flag) for flag in (0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1)]
    third, fourth, ninth, twelfth, last = (-n / 64 - 1 for n in (3, 4, 9, 12, 13))
    assert cut.prev_logprobs.tolist() == [0, 0, third, fourth, 0, 0, ninth, 0, 0, twelfth, last]
    assert cut.rewards.tolist() == rollouts.rewards.tolist()
    # token n was drawn from n % 3 + 1 ids: tokens 2, 3 and 8, then 11 and 12
    assert cut.support.offsets.tolist() == [0, 0, 0, 3, 4, 4, 4, 7, 7, 7, 10, 11]
    assert cut.support.token_ids.tolist() == [102, 1102, 2102, 103, 108, 1108, 2108, 111, 1111, 2111, 112]


def test_a_prompt_that_fills_the_budget_leaves_no_response():
    rollouts = make_rollouts([6, 3], prompt=5)
    cut, count = truncate_rollouts(rollouts, MicrobatchConfig(max_tokens=5, truncate=True), total_multiple=1)
    assert count == 1 and cut.lengths.tolist() == [5, 3] and not cut.response_mask.any()


def test_the_smaller_budget_decides():
    rollouts = make_rollouts([6, 3])
    config = MicrobatchConfig(max_tokens=8, max_tokens_forward=5, truncate=True)
    cut, count = truncate_rollouts(rollouts, config, total_multiple=1)
    assert count == 1 and cut.lengths.tolist() == [5, 3]


@pytest.mark.parametrize("config", [{"max_tokens": 4}, {"max_tokens": 6, "truncate": True}])
def test_nothing_to_cut_is_the_batch_itself(config):
    rollouts = make_rollouts([6, 3], support=True)
    same, count = truncate_rollouts(rollouts, MicrobatchConfig(**config), total_multiple=1)
    assert count == 0
    assert_same(same, rollouts)


def test_truncated_is_the_selection_of_its_tokens():
    """The same as dropping the tokens by hand, column by column."""
    rollouts = make_rollouts([5, 2, 7], prompt=2, support=True)
    keep = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9])
    cut = rollouts.truncated(3)
    for name in ("tokens", "response_mask", "generation_logprobs", "prev_logprobs", "reference_logprobs", "values"):
        assert torch.equal(getattr(cut, name), getattr(rollouts, name)[keep])


@pytest.mark.parametrize(("limit", "remedy"), [(10, "use 8 or 12"), (3, "use 4,")])
def test_a_budget_that_the_layout_cannot_fill_is_refused(limit, remedy):
    """It would be cut shorter here than elsewhere, and another layout would train on other tokens."""
    config = MicrobatchConfig(max_tokens=limit, truncate=True)
    with pytest.raises(ConfigurationError, match=f"multiple of 4 .* got {limit}; {remedy}"):
        truncate_rollouts(make_rollouts([6, 3]), config, total_multiple=4)
