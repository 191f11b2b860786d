"""Tokens whose place inside or outside the support hangs on rounding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.config.recipe import MicrobatchConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.head import StageOutput, run_chunk
from megatron_support.megatron.minibatch import prepare_minibatch
from megatron_support.megatron.parts import ModelParts, evaluating
from megatron_support.megatron.schedule import run_schedule
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.types import SamplingParams, TokenBatch

_ROWS = 256
"""Rows sorted at a time."""


def near_boundary(logits: Tensor, targets: Tensor, sampling: SamplingParams, tolerance: float) -> Tensor:
    """Whether logits that differ by up to ``tolerance`` could give a target the other side of its support's boundary.

    Under top-k: its logit is within ``2 tolerance`` of the one across the boundary. Under top-p: p lies between the mass
    strictly above it as it would be if every logit within ``2 tolerance`` of its own stood below it, or above it, give
    or take ``tolerance``.

    Args:
        logits: ``[T, V]``.
        targets: int64 ``[T]``; False where it is < 0.
        sampling: numbers, or tensors ``[T]``.
        tolerance: of a logit divided by the temperature, and of a probability.

    Returns:
        bool ``[T]``.
    """
    rows, vocabulary = logits.shape

    def column(value: float | Tensor | None, off: float) -> Tensor:
        value = off if value is None else value
        return value if isinstance(value, Tensor) else torch.full((rows,), value, device=logits.device)

    top_k = column(sampling.top_k, 0).long()
    active_k = (top_k > 0) & (top_k < vocabulary)
    top_k = torch.where(active_k, top_k, vocabulary)
    top_p = column(sampling.top_p, 1.0).double()
    scaled = logits.double() / column(sampling.temperature, 1.0).double()[:, None]
    descending = scaled.sort(dim=-1, descending=True).values
    own = scaled.gather(1, targets.clamp_min(0)[:, None])
    last_kept = descending.gather(1, top_k[:, None] - 1)
    first_left = descending.gather(1, top_k.clamp_max(vocabulary - 1)[:, None])
    gap = torch.where(own >= last_kept, own - first_left, last_kept - own)[:, 0]
    near_k = active_k & (gap <= 2 * tolerance)
    kept = descending.masked_fill(torch.arange(vocabulary, device=logits.device) >= top_k[:, None], -torch.inf)
    mass = kept.softmax(dim=-1)
    itself = torch.where(own >= last_kept, (own - kept.logsumexp(-1, keepdim=True)).exp(), 0.0)[:, 0]
    most = torch.where(kept > own - 2 * tolerance, mass, 0.0).sum(-1) - itself
    least = torch.where(kept > own + 2 * tolerance, mass, 0.0).sum(-1)
    near_p = (top_p < 1) & (least - tolerance <= top_p) & (top_p <= most + tolerance)
    return (near_k | near_p) & (targets >= 0)


def boundary_tokens(
    model: ModelParts, rollouts: RolloutBatch, microbatch: MicrobatchConfig, groups: ParallelGroups, tolerance: float
) -> Tensor:
    """:func:`near_boundary` of every response token of a batch: bool ``[N]``. For a model in one process."""
    minibatch = prepare_minibatch(rollouts, microbatch=microbatch, groups=groups, device=model.device)

    def forward_step(iterator: Iterator[TokenBatch], chunk: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        output = run_chunk(chunk, batch, fused=False)
        return output.tensor, partial(examine, batch, output)

    def examine(batch: TokenBatch, output: StageOutput, tensor: Tensor, non_loss_data: bool = True) -> Tensor:
        rows = batch.response_mask.nonzero().flatten()
        near = [_examine_rows(model, batch, tensor, part, tolerance) for part in rows.split(_ROWS)]
        return batch.token_index[rows[torch.cat(near)]] if near else rows

    with torch.no_grad(), evaluating(model):
        found = run_schedule(model, minibatch, forward_step, forward_only=True)
    result = torch.zeros(rollouts.tokens.numel(), dtype=torch.bool)
    result[torch.cat(found).cpu()] = True
    return result


def _examine_rows(model: ModelParts, batch: TokenBatch, logits: Tensor, rows: Tensor, tolerance: float) -> Tensor:
    def take(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) else value

    fields = (batch.sampling.temperature, batch.sampling.top_k, batch.sampling.top_p)
    sampling = SamplingParams(*(take(value) for value in fields))
    return near_boundary(logits[rows, : model.vocab_size], batch.targets[rows], sampling, tolerance)
