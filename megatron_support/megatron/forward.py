"""Previous and reference log-probabilities: a forward-only pass through Megatron's own schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.config.recipe import LogprobConfig, MicrobatchConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.faults import check_replayed
from megatron_support.megatron.gather import gather_logprobs
from megatron_support.megatron.head import StageOutput, batch_logprobs, run_chunk, uses_fused_head
from megatron_support.megatron.minibatch import prepare_minibatch
from megatron_support.megatron.model_losses import check_model
from megatron_support.megatron.parts import ModelParts, evaluating
from megatron_support.megatron.schedule import run_schedule
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.types import TokenBatch, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class RolloutLogprobs:
    """Log-probabilities of all N tokens of a rollout batch, on the host, equal on every rank; 0 outside responses."""

    filtered: Tensor
    """fp32 ``[N]``, under each sequence's filter; -inf at a response token outside the support."""
    unfiltered: Tensor
    """fp32 ``[N]``, under the temperature alone."""


def compute_logprobs(
    model: ModelParts,
    rollouts: RolloutBatch,
    *,
    groups: ParallelGroups,
    microbatch: MicrobatchConfig,
    logprobs: LogprobConfig | None = None,
) -> RolloutLogprobs:
    """Log-probabilities of every response token under the model's present weights.

    For token t of a sequence: ``log softmax(logits[t-1] / temperature)[token t]``, over the support of the sequence's
    own top-k and top-p (``filtered``) and over the whole vocabulary (``unfiltered``).

    Every rank calls this with the same batch. Results go back to the batch's order by index, whatever order the
    schedule produces them in, and reach every pipeline, data- and context-parallel rank.

    Args:
        model: this rank's chunks; run in evaluation mode, without gradient.
        rollouts: the batch. For unfiltered values alone pass ``rollouts.without_filters()``, which costs less.
        groups: the ranks' layout.
        microbatch: layout and token budget (``max_tokens_forward`` where given).
        logprobs: chunking and ties.

    Raises:
        RolloutError: a sequence is longer than the token budget, or a kept set does not fit its token.
        ConfigurationError: a model with multi-token prediction, or replay without the sampler's kept sets.
    """
    check_model(model.config)
    logprobs = logprobs or LogprobConfig()
    rollouts = with_support_mode(rollouts, logprobs)
    check_replayed(rollouts, model.architecture.vocab_size)
    minibatch = prepare_minibatch(
        rollouts,
        microbatch=microbatch,
        groups=groups,
        device=model.device,
        virtual_pipeline=model.virtual_pipeline,
        sequence_parallel=model.config.sequence_parallel,
        forward_only=True,
    )

    fused = uses_fused_head(logprobs, model, groups, minibatch.tokens_held)

    def forward_step(iterator: Iterator[TokenBatch], chunk: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        output = run_chunk(chunk, batch, fused=fused)
        return output.tensor, partial(collect, batch, output)

    def collect(
        batch: TokenBatch, output: StageOutput, tensor: Tensor, non_loss_data: bool = True
    ) -> tuple[TokenBatch, TokenLogprobs]:
        return batch, batch_logprobs(output, batch, model=model, groups=groups, logprobs=logprobs)

    with torch.no_grad(), evaluating(model):
        results = run_schedule(model, minibatch, forward_step, forward_only=True)
    filtered, unfiltered, _ = gather_logprobs(results, rollouts.tokens.numel(), groups, model.device)
    return RolloutLogprobs(filtered=filtered, unfiltered=unfiltered)


def with_support_mode(rollouts: RolloutBatch, logprobs: LogprobConfig) -> RolloutBatch:
    """The batch with the sampler's kept sets where they are to be replayed, and without them elsewhere.

    Raises:
        ConfigurationError: replay, and the batch has filters but no kept sets.
    """
    if logprobs.support == "recompute":
        return rollouts.with_columns(support=None)
    if rollouts.support is None and bool(rollouts.filtering.any()):
        raise ConfigurationError(
            "logprobs.support replay needs rollouts with the sampler's kept sets, got none; have the engine export "
            "them, or use recompute"
        )
    return rollouts
