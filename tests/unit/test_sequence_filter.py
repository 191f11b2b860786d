"""The rollout-side filter on log-probability errors, and masking of truncated responses."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_support.errors import RolloutError
from megatron_support.rollouts import RolloutBatch, filter_sequences, mask_long_responses, sequence_logprob_errors

INF, NAN = float("inf"), float("nan")


def rollouts(prev: list[list[float]], generation: list[list[float]], **changes) -> RolloutBatch:
    """Responses behind one prompt token each, sampled under top-k unless ``top_k`` says otherwise."""
    lengths = torch.tensor([len(row) + 1 for row in prev])
    count = len(prev)
    fields = {
        "tokens": torch.zeros(int(lengths.sum()), dtype=torch.int64),
        "cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        "response_mask": torch.cat([torch.arange(int(n)) > 0 for n in lengths]),
        "rewards": torch.ones(count),
        "sample_mask": torch.ones(count, dtype=torch.bool),
        "group_ids": torch.arange(count),
        "temperature": torch.ones(count),
        "top_k": torch.full((count,), 40),
        "top_p": torch.ones(count),
        "sample_ids": tuple(f"s{i}" for i in range(count)),
        "prev_logprobs": torch.tensor([float(x) for row in prev for x in (0, *row)]),
        "generation_logprobs": torch.tensor([float(x) for row in generation for x in (0, *row)]),
    }
    return RolloutBatch(**{**fields, **changes})


def test_the_error_is_the_mean_of_e_to_the_absolute_difference():
    """C2: |d| = .1, 0 without the middle token: (1.105171 + 1) / 2 = 1.052585."""
    prev, generation = torch.tensor([[-1.0, -5.0, -2.0]]), torch.tensor([[-1.1, -0.7, -2.0]])
    errors = sequence_logprob_errors(prev, generation, torch.tensor([[1, 0, 1]]))
    assert errors.tolist() == pytest.approx([1.052585], abs=1e-6)
    flat = sequence_logprob_errors(
        prev[0], generation[0], torch.tensor([1, 0, 1]), sequence_ids=torch.tensor([1, 1, 1]), num_sequences=3
    )
    assert flat.tolist() == pytest.approx([0.0, 1.052585, 0.0], abs=1e-6)


@pytest.mark.parametrize(("value", "check"), [(-INF, math.isinf), (INF, math.isinf), (NAN, math.isnan)])
def test_the_error_is_strict(value, check):
    prev = torch.tensor([[-1.0, value]])
    errors = sequence_logprob_errors(prev, torch.full((1, 2), -1.0), torch.ones(1, 2))
    assert check(errors.item())
    assert sequence_logprob_errors(prev, torch.full((1, 2), -1.0), torch.tensor([[1, 0]])).item() == 1


def test_misshapen_arguments_are_named():
    with pytest.raises(RolloutError, match=r"generation_logprobs must have the shape of prev_logprobs \(1, 2\)"):
        sequence_logprob_errors(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
    with pytest.raises(RolloutError, match="pass sequence_ids with flat tokens"):
        sequence_logprob_errors(torch.zeros(2), torch.zeros(2), torch.ones(2))


def test_tokens_outside_the_support_leave_the_mean_and_faults_do_not():
    """Per row: far off; near; outside in prev; outside in both; nothing left; NaN; +inf; +inf beside -inf."""
    prev = [[-1, -1], [-1, -1], [-1, -INF], [-1, -INF], [-INF, -INF], [-1, NAN], [-1, INF], [-1, INF]]
    generation = [[-2, -2], [-1.1, -1], [-1, -1], [-1, -INF], [-1, -1], [-1, -1], [-1, -1], [-1, -INF]]
    result = filter_sequences(rollouts(prev, generation), threshold=1.5)
    assert result.rejected.tolist() == [True, False, False, False, False, True, True, True]
    assert result.rollouts.sample_mask.tolist() == [False, True, True, True, True, False, False, False]


def test_an_error_equal_to_the_threshold_is_accepted():
    """Equal log-probabilities have an error of 1, the smallest threshold there is."""
    assert not filter_sequences(rollouts([[-1, -2]], [[-1, -2]]), threshold=1.0).rejected.any()


def test_without_a_filter_minus_infinity_fails_any_threshold():
    batch = rollouts([[-1, -INF], [-1, -INF]], [[-1, -1], [-1, -1]], top_k=torch.tensor([0, 40]))
    assert filter_sequences(batch, threshold=1e30).rejected.tolist() == [True, False]


def test_the_report_says_how_many_how_correct_and_how_far():
    """Errors e^1, e^.1, e^.5 and a sample that was masked before; threshold 1.2 rejects two, one of them correct."""
    batch = rollouts(
        [[-1.0], [-1.0], [-1.0], [-9.0]],
        [[-2.0], [-1.1], [-1.5], [-1.0]],
        rewards=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        sample_mask=torch.tensor([True, True, True, False]),
    )
    result = filter_sequences(batch, threshold=1.2)
    assert result.rejected.tolist() == [True, False, True, False]
    assert result.metrics.compute() == pytest.approx(
        {
            "rejected_sequences": 2,
            "rejected_share_correct": 0.5,
            "sequence_error_min_before": math.exp(0.1),
            "sequence_error_max_before": math.e,
            "sequence_error_min_after": math.exp(0.1),
            "sequence_error_max_after": math.exp(0.1),
        },
        rel=1e-6,
    )
    assert batch.sample_mask.tolist() == [True, True, True, False]  # the input is left alone


def test_a_filter_without_a_column_or_with_a_meaningless_threshold_is_an_error():
    batch = rollouts([[-1.0]], [[-1.0]])
    with pytest.raises(RolloutError, match=r"threshold must be >= 1, .* got 0\.5; raise it"):
        filter_sequences(batch, threshold=0.5)
    with pytest.raises(RolloutError, match="needs the column prev_logprobs, got a batch without it"):
        filter_sequences(batch.with_columns(prev_logprobs=None), threshold=2.0)


def test_truncated_responses_are_masked():
    batch = rollouts([[-1.0], [-1.0] * 3, [-1.0] * 4], [[-1.0], [-1.0] * 3, [-1.0] * 4])
    assert mask_long_responses(batch, max_response_tokens=3).sample_mask.tolist() == [True, False, False]
    truncated = torch.tensor([True, False, False])
    assert mask_long_responses(batch, truncated=truncated).sample_mask.tolist() == [False, True, True]
    for arguments, message in (
        ({}, "must be given, got neither"),
        ({"max_response_tokens": 0}, "must be >= 1, got 0"),
        ({"truncated": torch.ones(2)}, r"one entry per sequence, 3, got \(2,\)"),
    ):
        with pytest.raises(RolloutError, match=message):
            mask_long_responses(batch, **arguments)
