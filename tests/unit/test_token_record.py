"""What one step's tokens leave behind for the report, worked out by hand."""

import math

import pytest
import torch

from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.files import read_rollouts, write_rollouts
from megatron_support.training.token_record import record_tokens, view_tokens

OUT = -math.inf


def batch(**changes) -> RolloutBatch:
    """a: prompt of one, b: prompt of two. Of a's tokens one is outside for the trainer, one for the present policy."""
    columns = {
        "tokens": torch.tensor([9, 1, 2, 3, 9, 9, 2, 2]),
        "cu_seqlens": torch.tensor([0, 4, 8]),
        "response_mask": torch.tensor([0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool),
        "rewards": torch.tensor([1.0, 0.0]),
        "sample_mask": torch.ones(2, dtype=torch.bool),
        "group_ids": torch.tensor([0, 0]),
        "temperature": torch.ones(2),
        "top_k": torch.tensor([5, 5]),
        "top_p": torch.ones(2),
        "sample_ids": ("a", "b"),
        "generation_logprobs": torch.tensor([0, -1, OUT, -1, 0, 0, -1, OUT]),
        "prev_logprobs": torch.tensor([0, -1, OUT, -1, 0, 0, -1, -1.0]),
        "curr_logprobs": torch.tensor([0, OUT, OUT, -1 + math.log(2), 0, 0, -1 - math.log(4), -1]),
        "advantages": torch.tensor([0, 1, 1, 1, 0, 0, -1, -1.0]),
    }
    return RolloutBatch(**{**columns, **changes})


def test_a_token_counts_for_the_first_source_and_others_have_a_ratio():
    view = view_tokens(batch())
    assert view.source.tolist() == [-1, 2, 0, -1, -1, -1, -1, 1]
    assert view.response_position.tolist() == [-1, 0, 1, 2, -1, -1, 0, 1]
    assert view.log_ratio.exp().tolist() == pytest.approx([1, 1, 1, 2, 1, 1, 0.25, 1])


def test_the_record_of_a_step():
    record = record_tokens(3, batch())
    assert record["excluded"] == {
        "previous": {"negative": 0, "zero": 0, "positive": 1},
        "generation": {"negative": 1, "zero": 0, "positive": 0},
        "current": {"negative": 0, "zero": 0, "positive": 1},
    }
    assert record["positions"] == {"total": [2, 2, 1], "excluded": [1, 2, 0]}
    assert record["tokens"] == {"2": 2, "1": 1}
    assert record["ratio"]["quantiles"][0] == 0.25 and record["ratio"]["quantiles"][-1] == 2
    assert (record["step"], record["response_tokens"]) == (3, 5)


def test_a_masked_or_unfiltered_sequence_excludes_nothing():
    masked = record_tokens(1, batch(sample_mask=torch.tensor([False, True])))
    assert sum(masked["excluded"]["previous"].values()) == 0 and masked["response_tokens"] == 2
    assert not view_tokens(batch(top_k=torch.zeros(2, dtype=torch.int64))).excluded.any()


def test_without_current_log_probabilities_there_is_no_ratio():
    record = record_tokens(1, batch(curr_logprobs=None))
    assert record["ratio"] is None and sum(record["excluded"]["current"].values()) == 0


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_current_log_probabilities_survive_a_file(ending, tmp_path):
    write_rollouts(tmp_path / f"r.{ending}", batch())
    again = read_rollouts(tmp_path / f"r.{ending}")
    assert torch.equal(again.curr_logprobs, batch().curr_logprobs)
