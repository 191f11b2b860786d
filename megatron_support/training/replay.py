"""``megatron-support replay``: a loss over a rollout file that holds current log-probabilities, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.config.advantages import Advantages
from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.replay import ReplayConfig
from megatron_support.errors import ConfigurationError
from megatron_support.loss import actor_loss
from megatron_support.megatron.actor_step import with_advantages
from megatron_support.megatron.faults import check_rollouts
from megatron_support.metrics import MetricSet
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.minibatch import split_minibatches
from megatron_support.training.token_record import SOURCES, TokenView, view_tokens


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One configuration over one file."""

    loss: float
    """Mean over minibatches; what a step reports."""
    metrics: dict[str, float]
    gradient: Tensor
    """fp32 ``[N]``: derivative of its minibatch's loss by each token's filtered log-probability; 0 where excluded."""
    view: TokenView
    rollouts: RolloutBatch
    """With the advantages that were used."""


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One token of a sample, for a table."""

    sample: str
    position: int
    """In the sequence, from 0."""
    token: int
    current: float | None
    previous: float | None
    ratio: float | None
    """None where the token is excluded or a log-probability is not in the file."""
    advantage: float | None
    gradient: float
    excluded_by: str | None


def replay(config: ReplayConfig, rollouts: RolloutBatch) -> Replay:
    """Loss, metrics and gradient by the current log-probabilities.

    Args:
        config: loss, advantages, minibatches.
        rollouts: with ``curr_logprobs`` and what the loss reads besides; ``rollouts_last_step.jsonl`` of a run, or a
            file that ``megatron-support score`` has completed.

    Raises:
        ConfigurationError: a column that the loss or the advantages read is missing.
        LogprobFault: a number that must be finite is not, by sample and token.
    """
    if rollouts.curr_logprobs is None:
        check_rollouts(rollouts, config.loss)  # a fault that ended the step before its loss
        raise ConfigurationError(
            "a replay needs the column curr_logprobs, got none; take rollouts_last_step.jsonl of a run with "
            "logging.tokens true, or add it with: megatron-support score FILE RECIPE --role current"
        )
    rollouts = _with_advantages(rollouts, config.advantages)
    check_rollouts(rollouts, config.loss, current=True)
    merged, losses = MetricSet(), []
    gradient = torch.zeros(rollouts.tokens.numel())
    parts = split_minibatches(rollouts.num_sequences, config.minibatches)
    starts = rollouts.cu_seqlens
    for part in parts:
        batch = rollouts.select(part)
        value, metrics, slope = _minibatch(config.loss, batch)
        losses.append(value)
        merged = merged.merge(metrics)
        first, last = int(part[0]), int(part[-1])  # a part is a run of sequences: nothing was shuffled
        gradient[starts[first] : starts[last + 1]] = slope
    return Replay(
        loss=sum(losses) / len(losses),
        metrics=merged.compute(),
        gradient=gradient,
        view=view_tokens(rollouts),
        rollouts=rollouts,
    )


def worst_tokens(result: Replay, *, samples: int) -> list[TokenRow]:
    """The token of each sample with the largest ``|log-ratio|``, the worst samples first.

    Without previous log-probabilities, the largest ``|gradient|`` decides.

    Args:
        result: of :func:`replay`.
        samples: how many at most.
    """
    log_ratio = result.view.log_ratio
    size = result.gradient if log_ratio is None else log_ratio
    return [_row(result, token) for token in _largest(size.abs(), result.rollouts, samples)]


def changed_tokens(first: Replay, second: Replay, *, samples: int) -> list[tuple[TokenRow, TokenRow]]:
    """The token of each sample whose gradient differs most between two replays of a file, the largest change first.

    Args:
        first, second: of :func:`replay`, over the same file.
        samples: how many at most; samples without a change are left out.
    """
    change = (second.gradient - first.gradient).abs()
    tokens = _largest(change, first.rollouts, samples)
    return [(_row(first, token), _row(second, token)) for token in tokens]


def _largest(size: Tensor, rollouts: RolloutBatch, samples: int) -> list[int]:
    """The token of each sample with the largest size, largest first; sizes of 0 are left out."""
    found = torch.zeros(rollouts.num_sequences).scatter_reduce(0, rollouts.sequence_ids, size, "amax")
    chosen = found.argsort(descending=True, stable=True)[:samples].tolist()
    starts = rollouts.cu_seqlens.tolist()
    return [starts[s] + int(size[starts[s] : starts[s + 1]].argmax()) for s in chosen if float(found[s]) > 0]


def _row(result: Replay, token: int) -> TokenRow:
    rollouts, view = result.rollouts, result.view
    sequence = int(rollouts.sequence_ids[token])
    source = int(view.source[token])

    def entry(column: Tensor | None) -> float | None:
        return None if column is None else float(column[token])

    return TokenRow(
        sample=rollouts.sample_ids[sequence],
        position=token - int(rollouts.cu_seqlens[sequence]),
        token=int(rollouts.tokens[token]),
        current=entry(rollouts.curr_logprobs),
        previous=entry(rollouts.prev_logprobs),
        ratio=None if view.log_ratio is None or source >= 0 else float(view.log_ratio[token].exp()),
        advantage=entry(rollouts.advantages),
        gradient=float(result.gradient[token]),
        excluded_by=SOURCES[source] if source >= 0 else None,
    )


def _with_advantages(rollouts: RolloutBatch, advantages: Advantages | None) -> RolloutBatch:
    if advantages is not None:
        return with_advantages(rollouts, advantages)
    if rollouts.advantages is None:
        raise ConfigurationError(
            "advantages must be in the file or be computed, got neither; set advantages.type=grpo or another"
        )
    return rollouts


def _minibatch(config: ActorLossConfig, batch: RolloutBatch) -> tuple[float, MetricSet, Tensor]:
    assert batch.curr_logprobs is not None and batch.advantages is not None
    current = batch.curr_logprobs.clone().requires_grad_()
    output = actor_loss(
        config,
        curr_logprobs=current,
        curr_logprobs_unfiltered=batch.curr_logprobs_unfiltered,
        entropy=batch.entropy,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        sample_mask=batch.sample_mask,
        sequence_ids=batch.sequence_ids,
        prev_logprobs=batch.prev_logprobs,
        generation_logprobs=batch.generation_logprobs,
        reference_logprobs=batch.reference_logprobs,
        rewards=batch.rewards,
        filtered=batch.filtering,
    )
    (slope,) = torch.autograd.grad(output.loss, current)
    return float(output.loss.detach()), output.metrics, slope
