"""A rollout minibatch as Megatron's schedules want it: this rank's microbatches of one shape, and global counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy
import torch
from torch import Tensor

from megatron_support.config.recipe import MicrobatchConfig
from megatron_support.distributed.counts import global_counts
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.microbatch import build_microbatch
from megatron_support.rollouts.planning import microbatch_shape, plan_microbatches
from megatron_support.types import TokenBatch


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """What one call of Megatron's forward-backward function works on."""

    microbatches: Sequence[TokenBatch]
    """This rank's, all of one shape; the count is the same on every data-parallel rank."""
    micro_batch_size: int
    """Rows of a microbatch, for the schedule's ``micro_batch_size``."""
    seq_length: int
    """Padded tokens of a row before the context-parallel split, for the schedule's ``seq_length``."""
    sample_mask: Tensor
    """bool ``[S]``, S sequences of the whole minibatch."""
    rewards: Tensor
    """fp32 ``[S]``."""
    filtered: Tensor
    """bool ``[S]``, whether a token of the sequence can fall outside the support."""
    valid_tokens: int
    """Response tokens of valid sequences over all ranks, before exclusion."""
    valid_sequences: int
    """Sequences with sample_mask and at least one response token, over all ranks."""
    positive_tokens: int
    """Response tokens of valid sequences with a positive reward, over all ranks."""
    padded_tokens: int
    """Tokens of all microbatches over all ranks, padding included."""
    tokens_held: int
    """Tokens of one microbatch on this rank, padding included: after the context-parallel split."""

    def __len__(self) -> int:
        return len(self.microbatches)


class PlannedMicrobatches(Sequence[TokenBatch]):
    """Microbatches that are built when they are asked for, each time anew.

    A step then holds what its schedule holds, not the whole minibatch, and building goes on beside a device's work.

    Args:
        plan: indices ``[n]`` of the sequences of each microbatch.
        build: makes a microbatch of such indices.
    """

    def __init__(self, plan: Sequence[Tensor], build: Callable[[Tensor], TokenBatch]) -> None:
        self._plan = plan
        self._build = build

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[TokenBatch]:
        return map(self._build, self._plan)  # Sequence's own takes an IndexError of building for the end

    @overload
    def __getitem__(self, index: int) -> TokenBatch: ...

    @overload
    def __getitem__(self, index: slice) -> PlannedMicrobatches: ...

    def __getitem__(self, index: int | slice) -> TokenBatch | PlannedMicrobatches:
        if isinstance(index, slice):
            return PlannedMicrobatches(self._plan[index], self._build)
        return self._build(self._plan[index])


def prepare_minibatch(
    rollouts: RolloutBatch,
    *,
    microbatch: MicrobatchConfig,
    groups: ParallelGroups,
    device: torch.device,
    columns: Sequence[str] = (),
    virtual_pipeline: int | None = None,
    sequence_parallel: bool = False,
    forward_only: bool = False,
) -> Minibatch:
    """Cut a minibatch into this rank's microbatches.

    Args:
        rollouts: the minibatch, the same on every rank; token indices of the result point into it.
        microbatch: layout and token budget.
        groups: the ranks' layout.
        device: where the microbatches go.
        columns: names of per-token columns that the loss reads.
        virtual_pipeline: model chunks per pipeline rank; the interleaved schedule needs a multiple of the pipeline
            size of microbatches.
        sequence_parallel: whether tokens are split over the tensor-parallel group.
        forward_only: use the budget of forward-only passes.

    Raises:
        RolloutError: a sequence is longer than the budget.
    """
    budget = microbatch.max_tokens
    if forward_only and microbatch.max_tokens_forward is not None:
        budget = microbatch.max_tokens_forward
    context = groups.context_size
    sequence_multiple, total_multiple = token_multiples(
        context_size=context, tensor_size=groups.tensor_size, sequence_parallel=sequence_parallel
    )
    plan = plan_microbatches(
        rollouts.lengths,
        max_tokens=budget,
        data_parallel_size=groups.data_size,
        layout=microbatch.layout,
        sequence_multiple=sequence_multiple,
        total_multiple=total_multiple,
        count_multiple=groups.pipeline_size if virtual_pipeline else 1,
        sample_ids=rollouts.sample_ids,
    )[groups.data_rank]
    shape = microbatch_shape(
        rollouts.lengths,
        plan,
        layout=microbatch.layout,
        sequence_multiple=sequence_multiple,
        total_multiple=total_multiple,
    )
    given = tuple(name for name in columns if getattr(rollouts, name) is not None)

    def build(indices: Tensor) -> TokenBatch:
        return build_microbatch(
            rollouts,
            indices,
            layout=microbatch.layout,
            pad_to=shape,
            context_rank=groups.context_rank,
            context_size=context,
            sequence_multiple=sequence_multiple,
            columns=given,
        ).to(device)

    padded = torch.tensor([len(plan) * shape[0] * shape[1]])
    counts = global_counts(torch.cat([_local_counts(rollouts, torch.cat(plan)), padded]).to(device), groups.data)
    valid_tokens, valid_sequences, positive_tokens, padded_tokens = counts.tolist()
    return Minibatch(
        microbatches=PlannedMicrobatches(plan, build),
        micro_batch_size=shape[0],
        seq_length=shape[1],
        sample_mask=rollouts.sample_mask.to(device),
        rewards=rollouts.rewards.to(device),
        filtered=rollouts.filtering.to(device),
        valid_tokens=valid_tokens,
        valid_sequences=valid_sequences,
        positive_tokens=positive_tokens,
        padded_tokens=padded_tokens,
        tokens_held=shape[0] * shape[1] // context,
    )


def truncate_rollouts(
    rollouts: RolloutBatch, microbatch: MicrobatchConfig, *, total_multiple: int
) -> tuple[RolloutBatch, int]:
    """The batch with sequences cut at the token budget where ``microbatch.truncate`` says so.

    It comes before the first pass, so that previous and reference log-probabilities, advantages and every minibatch
    are about the same tokens. A prompt that fills the budget leaves a sequence without a response, which no count and
    no term of the loss sees.

    Args:
        rollouts: the batch of one step.
        microbatch: the budgets.
        total_multiple: of :func:`token_multiples`.

    Returns:
        The batch, and how many of its sequences were cut.

    Raises:
        ConfigurationError: the layout would have to cut shorter than the budget, so that another layout would train on
            other tokens.
    """
    if not microbatch.truncate:
        return rollouts, 0
    check_truncation(microbatch, total_multiple=total_multiple)
    limit = microbatch.longest_sequence
    return rollouts.truncated(limit), int((rollouts.lengths > limit).sum())


def check_truncation(microbatch: MicrobatchConfig, *, total_multiple: int) -> None:
    """Check that a layout can hold a sequence that fills the budget.

    Raises:
        ConfigurationError: it cannot.
    """
    limit = microbatch.longest_sequence
    if microbatch.truncate and limit % total_multiple:
        lower, upper = limit // total_multiple * total_multiple, -(-limit // total_multiple) * total_multiple
        raise ConfigurationError(
            f"with truncate the smaller token budget of train.microbatch must be a multiple of {total_multiple} in "
            f"this layout (context and sequence parallelism), got {limit}; "
            f"use {f'{lower} or ' if lower else ''}{upper}, or set truncate to false"
        )


def token_multiples(*, context_size: int, tensor_size: int, sequence_parallel: bool) -> tuple[int, int]:
    """What the length of a sequence, and the tokens of a microbatch (a padded row), must be multiples of.

    Context parallelism cuts each sequence in 2C chunks; sequence parallelism cuts what is left over the tensor ranks.
    """
    sequence_multiple = 2 * context_size if context_size > 1 else 1
    return sequence_multiple, math.lcm(sequence_multiple, context_size * (tensor_size if sequence_parallel else 1))


def _local_counts(rollouts: RolloutBatch, indices: Tensor) -> Tensor:
    """int64 ``[3]``: response tokens, valid sequences and positive response tokens of this rank's share."""
    mask, begins, ends = rollouts.response_mask.numpy(), rollouts.cu_seqlens[indices], rollouts.cu_seqlens[indices + 1]
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    tokens = torch.tensor([numpy.count_nonzero(mask[begin:end]) for begin, end in spans], dtype=torch.int64)
    tokens = torch.where(rollouts.sample_mask[indices], tokens, 0)
    positive = torch.where(rollouts.rewards[indices] > 0, tokens, 0)
    return torch.stack([tokens.sum(), (tokens > 0).sum(), positive.sum()])
