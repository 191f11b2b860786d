"""Rollouts: files, batches, minibatches and microbatches."""

from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.files import concatenate, read_rollouts, write_rollouts

__all__ = ["RolloutBatch", "concatenate", "read_rollouts", "write_rollouts"]
