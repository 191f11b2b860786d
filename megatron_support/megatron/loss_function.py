"""The actor loss as a Megatron forward_step / loss_func pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.recipe import LogprobConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.distributed.sequence_sum import sum_over_group
from megatron_support.loss import actor_loss, find_faults
from megatron_support.megatron.head import StageOutput, batch_logprobs, run_chunk, support_metrics, uses_fused_head
from megatron_support.megatron.minibatch import Minibatch
from megatron_support.megatron.model_losses import (
    check_actor_loss,
    check_model,
    counts_survivors,
    has_auxiliary_losses,
)
from megatron_support.megatron.parts import ModelParts
from megatron_support.megatron.scaling import loss_factor
from megatron_support.metrics import MetricSet
from megatron_support.types import LossOutput, TokenBatch, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class MicrobatchRecord:
    """What one microbatch leaves behind on the last pipeline stage. Nothing in it is attached to a graph."""

    batch: TokenBatch
    logprobs: TokenLogprobs
    """As the loss saw them: kept so that a fault can be named after the schedule has ended."""
    loss: Tensor
    """The local part of the loss, before Megatron's scaling."""
    metrics: MetricSet
    surviving_tokens: Tensor
    surviving_sequences: Tensor
    faults: Tensor
    """int64 scalar: current log-probabilities that must be finite and are not."""


class MegatronActorLoss:
    """Forward step and loss function for one minibatch in any Megatron training loop.

    The loss is this rank's part of the globally normalised actor loss, times the factor that cancels what Megatron's
    schedule and gradient reduction do to it (see :mod:`megatron_support.megatron.scaling`), so that the gradients in
    the model are those of one process that saw the whole minibatch.

    Use::

        loss = MegatronActorLoss(config, model=model, minibatch=minibatch, groups=groups)
        records = run_schedule(model, minibatch, loss.forward_step, forward_only=False)

    Args:
        config: the actor loss.
        model: this rank's chunks.
        minibatch: microbatches and global counts.
        groups: the ranks' layout.
        logprobs: chunking and ties.
    """

    def __init__(
        self,
        config: ActorLossConfig,
        *,
        model: ModelParts,
        minibatch: Minibatch,
        groups: ParallelGroups,
        logprobs: LogprobConfig | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.minibatch = minibatch
        self.groups = groups
        self.logprobs = logprobs or LogprobConfig()
        self.fused = uses_fused_head(self.logprobs, model, groups, minibatch.microbatches[0].targets.numel())
        self.per_token = bool(model.config.calculate_per_token_loss)
        self.survivors = counts_survivors(config)
        self.auxiliary = has_auxiliary_losses(model.config)
        check_model(model.config)
        check_actor_loss(config, model.config)
        self.factor = loss_factor(
            calculate_per_token_loss=self.per_token,
            num_microbatches=len(minibatch),
            data_parallel_size=groups.data_size,
            context_parallel_size=groups.context_size,
        )

    def forward_step(self, iterator: Iterator[TokenBatch], chunk: Any) -> tuple[Tensor, Any]:
        """Megatron's ``forward_step_func``: the next microbatch through one model chunk."""
        batch = next(iterator)
        output = run_chunk(chunk, batch, fused=self.fused)
        return output.tensor, partial(self.loss_func, batch, output)

    def loss_func(self, batch: TokenBatch, output: StageOutput, tensor: Tensor) -> tuple[Any, ...]:
        """Megatron's ``loss_func`` for the last stage's output; ``tensor`` is ``output.tensor``, as Megatron passes it.

        Returns:
            ``(loss, record)``, or ``(loss sum, count, record)`` where the schedule divides by a total of counts: of
            survivors, or of tokens where auxiliary losses of experts are multiplied by them.
        """
        parts: dict[str, Any] = {"model": self.model, "groups": self.groups, "logprobs": self.logprobs}
        compared = support_metrics(output, batch, **parts)
        values = batch_logprobs(
            output,
            batch,
            **parts,
            entropy=self.config.entropy_coef != 0,
            inplace_backward=True,
        )
        result = self.actor_loss(batch, values)
        record = MicrobatchRecord(
            batch=batch,
            logprobs=_detached(values),
            loss=result.loss.detach().clone(),
            metrics=result.metrics | compared,
            surviving_tokens=result.surviving_tokens,
            surviving_sequences=result.surviving_sequences,
            faults=find_faults(self.config, **self.tensors(batch, values)).total,
        )
        if self.survivors and self.per_token:
            return result.loss.clone(), self.survivor_count(record).to(torch.int), record
        if self.auxiliary and self.per_token:
            tokens = torch.tensor(batch.targets.numel(), dtype=torch.int, device=result.loss.device)
            return result.loss * self.minibatch.padded_tokens, tokens, record
        return result.loss * self.factor, record

    def actor_loss(self, batch: TokenBatch, values: TokenLogprobs) -> LossOutput:
        """This microbatch's part of the loss; divided by global counts, or a sum under ``survivors``."""
        context = self.groups.context

        def divisor(count: int) -> int:
            return 1 if self.survivors else count

        return actor_loss(
            self.config,
            **self.tensors(batch, values),
            global_valid_tokens=divisor(self.minibatch.valid_tokens),
            global_valid_sequences=divisor(self.minibatch.valid_sequences),
            global_positive_tokens=divisor(self.minibatch.positive_tokens),
            sequence_sum=None if context is None else partial(sum_over_group, group=context),
            counts_sequences=None if context is None else self.groups.context_rank == 0,
        )

    def tensors(self, batch: TokenBatch, values: TokenLogprobs) -> dict[str, Any]:
        """What the loss (and the search for faults) reads of a microbatch, by argument name."""
        columns = batch.columns
        return {
            "curr_logprobs": values.filtered,
            "curr_logprobs_unfiltered": values.unfiltered,
            "entropy": values.entropy,
            "advantages": columns["advantages"],
            "response_mask": batch.response_mask,
            "sequence_ids": batch.sequence_ids,
            "sample_mask": self.minibatch.sample_mask,
            "rewards": self.minibatch.rewards,
            "filtered": self.minibatch.filtered[batch.sequence_ids],
            "prev_logprobs": columns.get("prev_logprobs"),
            "generation_logprobs": columns.get("generation_logprobs"),
            "reference_logprobs": columns.get("reference_logprobs"),
        }

    @property
    def rollout_count(self) -> int:
        """The denominator under ``survivors`` where nothing survived."""
        return self.minibatch.valid_tokens if self.config.denominator == "tokens" else self.minibatch.valid_sequences

    def survivor_count(self, record: MicrobatchRecord) -> Tensor:
        """The count that divides everything under ``survivors``: tokens or sequences, by the aggregation."""
        return record.surviving_tokens if self.config.denominator == "tokens" else record.surviving_sequences


def _detached(values: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        filtered=values.filtered.detach(),
        unfiltered=values.unfiltered.detach(),
        entropy=None if values.entropy is None else values.entropy.detach(),
        in_support=values.in_support,
    )
