"""Where the tokens of NeMo-RL's rows are in a rank's logits, and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.adapters.context import AdapterSettings, global_vocab_size
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.rollouts.microbatch import context_positions
from megatron_support.support import support_logprobs
from megatron_support.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class LocalRows:
    """Which token of ``[B, S]`` each of T local rows of logits predicts."""

    sequence: Tensor
    """int64 ``[T]``, row of the batch."""
    position: Tensor
    """int64 ``[T]``, column of the predicted token; 0 where there is none (no row predicts the first token)."""

    def to(self, device: torch.device) -> LocalRows:
        return LocalRows(sequence=self.sequence.to(device), position=self.position.to(device))

    @property
    def predicts(self) -> Tensor:
        return self.position > 0

    def take(self, values: Tensor) -> Tensor:
        """``[T]`` out of ``[B, S]``."""
        return values[self.sequence, self.position]

    def targets(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        """int64 ``[T]``: ids of the predicted tokens, -1 where there is none or ``where`` ``[B, S]`` is 0."""
        wanted = self.predicts if where is None else self.predicts & (self.take(where) != 0)
        return torch.where(wanted, self.take(tokens), -1)

    def put(self, values: Tensor, shape: torch.Size, groups: ParallelGroups) -> Tensor:
        """``[B, S]`` out of ``[T]`` of all context-parallel ranks, 0 elsewhere; collective where there are several."""
        whole = values.new_zeros(shape)
        whole[self.sequence[self.predicts], self.position[self.predicts]] = values[self.predicts]
        if groups.context is not None:
            dist.all_reduce(whole, group=groups.context)  # one rank has each token; 0 + -inf is -inf
        return whole


def local_rows(segments: Tensor, width: int, groups: ParallelGroups) -> LocalRows:
    """Rows of logits of padded sequences that lie end to end, each cut for context parallelism.

    Args:
        segments: int64 ``[B]`` on the host, padded tokens of each sequence before the cut.
        width: S, tokens of a row of the batch; predictions of tokens past it are of padding.
        groups: the ranks' layout.
    """
    ids = torch.repeat_interleave(torch.arange(len(segments)), segments)
    starts = segments.cumsum(0) - segments
    mine = context_positions(segments, groups.context_size, groups.context_rank)
    sequence = ids[mine]
    predicted = mine - starts[sequence] + 1
    inside = (predicted < width) & (predicted < segments[sequence])
    return LocalRows(sequence=sequence, position=torch.where(inside, predicted, 0))


def row_logprobs(
    logits: Tensor,
    targets: Tensor,
    sampling: SamplingParams,
    *,
    groups: ParallelGroups,
    settings: AdapterSettings,
    **options: Any,
) -> TokenLogprobs:
    """Log-probabilities ``[T]``.

    Args:
        logits: ``[T, V/TP]``.
        targets: int64 ``[T]``, -1 where there is none.
        sampling: the filter. NeMo-RL has divided the logits by the temperature.
        groups, settings: this process's.
        options: of :func:`megatron_support.support_logprobs`.
    """
    return support_logprobs(
        logits,
        targets,
        sampling,
        vocab_size=global_vocab_size(logits.shape[-1], groups, settings.vocab_size),
        tp_group=groups.tensor,
        ties=settings.logprobs.ties,
        chunk_size=settings.logprobs.chunk_size,
        **options,
    )


def trained_sampling(params: Any) -> SamplingParams:
    """NeMo-RL's ``TrainingSamplingParams`` without the temperature, by which it has divided the logits."""
    if params is None:
        return SamplingParams()
    top_k, top_p = params.top_k, params.top_p
    return SamplingParams(1.0, top_k if top_k is not None and top_k > 0 else None, 1.0 if top_p is None else top_p)
