"""Rollouts: files, batches, minibatches and microbatches."""

from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.files import concatenate, read_rollouts, write_rollouts
from megatron_support.rollouts.sequence_filter import filter_sequences, mask_long_responses, sequence_logprob_errors

__all__ = [
    "RolloutBatch",
    "concatenate",
    "filter_sequences",
    "mask_long_responses",
    "read_rollouts",
    "sequence_logprob_errors",
    "write_rollouts",
]
