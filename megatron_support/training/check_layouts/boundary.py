"""What one process says of single tokens: which hang on rounding, and which are far outside their support."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.config.recipe import MicrobatchConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.head import run_chunk
from megatron_support.megatron.minibatch import prepare_minibatch
from megatron_support.megatron.parts import ModelParts, evaluating
from megatron_support.megatron.schedule import run_schedule
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.types import SamplingParams, TokenBatch

_ROWS = 256
"""Rows sorted at a time."""


def near_boundary(logits: Tensor, targets: Tensor, sampling: SamplingParams, tolerance: float) -> Tensor:
    """Whether logits that differ by up to ``tolerance`` could give a target the other side of its support's boundary.

    Under top-k: its logit is within ``2 tolerance`` of the one across the boundary. Under top-p: p lies between the
    mass strictly above it as it would be if every logit within ``2 tolerance`` of its own stood below it, or above it,
    give or take ``tolerance``.

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

    def near(logits: Tensor, targets: Tensor, sampling: SamplingParams) -> Tensor:
        return near_boundary(logits, targets, sampling, tolerance)

    index, found = _examine(model, rollouts, microbatch, groups, near)
    result = torch.zeros(rollouts.tokens.numel(), dtype=torch.bool)
    result[index] = found
    return result


def with_tokens_outside(
    model: ModelParts, rollouts: RolloutBatch, microbatch: MicrobatchConfig, groups: ParallelGroups, *, every: int
) -> RolloutBatch:
    """Replace the last response token of every ``every``-th sequence by the one that the model finds least likely.

    It is outside the support under any filter. Being the last, it changes no other token's probability unless tokens of
    an environment follow. For a model in one process.
    """
    ends = rollouts.cu_seqlens
    last = []
    for row in range(0, rollouts.num_sequences, every):
        responses = rollouts.response_mask[ends[row] : ends[row + 1]].nonzero().flatten()
        last += [int(ends[row] + responses[-1])] if responses.numel() else []
    index, found = _examine(model, rollouts, microbatch, groups, lambda logits, targets, sampling: logits.argmin(-1))
    tokens = rollouts.tokens.clone()
    tokens[index] = found
    chosen = torch.zeros_like(rollouts.response_mask)
    chosen[torch.tensor(last, dtype=torch.int64)] = True
    return rollouts.with_columns(tokens=torch.where(chosen, tokens, rollouts.tokens))


def _examine(
    model: ModelParts,
    rollouts: RolloutBatch,
    microbatch: MicrobatchConfig,
    groups: ParallelGroups,
    of_rows: Callable[[Tensor, Tensor, SamplingParams], Tensor],
) -> tuple[Tensor, Tensor]:
    """Positions of response tokens in the batch, and ``of_rows(logits [T, V], targets [T], sampling)`` of them."""
    minibatch = prepare_minibatch(rollouts, microbatch=microbatch, groups=groups, device=model.device)

    def forward_step(iterator: Iterator[TokenBatch], chunk: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        output = run_chunk(chunk, batch, fused=False)
        return output.tensor, partial(examine, batch)

    def examine(batch: TokenBatch, logits: Tensor, non_loss_data: bool = True) -> tuple[Tensor, Tensor]:
        rows = batch.response_mask.nonzero().flatten()
        parts = [
            of_rows(logits[part, : model.vocab_size], batch.targets[part], _sampling_of(batch, part))
            for part in rows.split(_ROWS)
        ]
        return batch.token_index[rows].cpu(), torch.cat(parts).cpu()

    with torch.no_grad(), evaluating(model):
        index, found = zip(*run_schedule(model, minibatch, forward_step, forward_only=True), strict=True)
    return torch.cat(index), torch.cat(found)


def _sampling_of(batch: TokenBatch, rows: Tensor) -> SamplingParams:
    def take(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) else value

    sampling = batch.sampling
    return SamplingParams(take(sampling.temperature), take(sampling.top_k), take(sampling.top_p))
