"""The actor loss as a Megatron forward_step / loss_func pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.recipe import LogprobConfig
from megatron_support.distributed.counts import global_counts
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.distributed.sequence_sum import sum_over_group
from megatron_support.errors import ConfigurationError
from megatron_support.loss import actor_loss, find_faults
from megatron_support.megatron.head import StageOutput, batch_logprobs, run_chunk, support_metrics, uses_fused_head
from megatron_support.megatron.minibatch import Minibatch
from megatron_support.megatron.model_losses import (
    check_actor_loss,
    check_model,
    counts_ahead,
    counts_survivors,
    has_auxiliary_losses,
)
from megatron_support.megatron.parts import ModelParts, evaluating
from megatron_support.megatron.scaling import loss_factor
from megatron_support.megatron.schedule import run_schedule
from megatron_support.metrics import Mean, MetricSet
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


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Global counts that divide the loss; 1 each where it is left a sum."""

    tokens: int
    sequences: int
    positive_tokens: int
    """Divides the positive-sample NLL."""


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
        denominators: of :func:`count_survivors`, for ``normalization: survivors``. None: the loss stays a sum, to be
            divided when the last microbatch has been through.

    Raises:
        ConfigurationError: the configuration needs ``denominators``, or does not go with the model's own losses.
    """

    def __init__(
        self,
        config: ActorLossConfig,
        *,
        model: ModelParts,
        minibatch: Minibatch,
        groups: ParallelGroups,
        logprobs: LogprobConfig | None = None,
        denominators: Denominators | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.minibatch = minibatch
        self.groups = groups
        self.logprobs = logprobs or LogprobConfig()
        self.fused = uses_fused_head(self.logprobs, model, groups, minibatch.tokens_held)
        self.per_token = bool(model.config.calculate_per_token_loss)
        self.survivors = counts_survivors(config) and denominators is None
        self.denominators = denominators or _denominators(config, minibatch)
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

    def count_step(self, iterator: Iterator[TokenBatch], chunk: Any) -> tuple[Tensor, Any]:
        """``forward_step_func`` of a forward-only pass that counts survivors: int64 ``[3]``, tokens, sequences and
        tokens of positive samples."""
        batch = next(iterator)
        output = run_chunk(chunk, batch, fused=self.fused)

        def count(tensor: Tensor, non_loss_data: bool = True) -> Tensor:
            found = self.actor_loss(batch, self._values(output, batch), metrics="minimal")
            nll = found.metrics["positive_nll_loss"]
            assert isinstance(nll, Mean)
            positive = torch.as_tensor(nll.count, device=tensor.device).long()
            return torch.stack([found.surviving_tokens, found.surviving_sequences, positive])

        return output.tensor, count

    def loss_func(self, batch: TokenBatch, output: StageOutput, tensor: Tensor) -> tuple[Any, ...]:
        """Megatron's ``loss_func`` for the last stage's output; ``tensor`` is ``output.tensor``, as Megatron passes it.

        Returns:
            ``(loss, record)``, or ``(loss sum, count, record)`` where the schedule divides by a total of counts: of
            survivors, or of tokens where auxiliary losses of experts are multiplied by them.
        """
        compared = support_metrics(output, batch, model=self.model, groups=self.groups, logprobs=self.logprobs)
        values = self._values(output, batch, entropy=self.config.entropy_coef != 0, inplace_backward=True)
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

    def _values(self, output: StageOutput, batch: TokenBatch, **options: bool) -> TokenLogprobs:
        return batch_logprobs(output, batch, model=self.model, groups=self.groups, logprobs=self.logprobs, **options)

    def actor_loss(
        self, batch: TokenBatch, values: TokenLogprobs, *, metrics: Literal["full", "minimal"] = "full"
    ) -> LossOutput:
        """This microbatch's part of the loss; divided by global counts, or a sum under ``survivors``."""
        context = self.groups.context
        return actor_loss(
            self.config,
            **self.tensors(batch, values),
            global_valid_tokens=self.denominators.tokens,
            global_valid_sequences=self.denominators.sequences,
            global_positive_tokens=self.denominators.positive_tokens,
            sequence_sum=None if context is None else partial(sum_over_group, group=context),
            counts_sequences=None if context is None else self.groups.context_rank == 0,
            metrics=metrics,
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


def _denominators(config: ActorLossConfig, minibatch: Minibatch) -> Denominators:
    """Counts before exclusion, or 1 where the surviving ones are not known yet."""
    if counts_ahead(config):
        raise ConfigurationError(
            "denominators must be given with loss.normalization survivors and loss.positive_nll_coef "
            f"{config.positive_nll_coef}, got None: two counts divide the loss, which no division afterwards can; pass "
            "count_survivors(config, ...)"
        )
    if counts_survivors(config):
        return Denominators(tokens=1, sequences=1, positive_tokens=1)
    return _before_exclusion(minibatch)


def _before_exclusion(minibatch: Minibatch) -> Denominators:
    return Denominators(
        tokens=minibatch.valid_tokens, sequences=minibatch.valid_sequences, positive_tokens=minibatch.positive_tokens
    )


def count_survivors(
    config: ActorLossConfig,
    *,
    model: ModelParts,
    minibatch: Minibatch,
    groups: ParallelGroups,
    logprobs: LogprobConfig | None = None,
) -> Denominators:
    """What ``normalization: survivors`` divides by, counted in a forward-only pass over the minibatch.

    One count can divide gradients afterwards, and needs no such pass. The positive-sample NLL has a second one.
    Where nothing survived, a count before exclusion stands in. Arguments and errors as for :class:`MegatronActorLoss`.

    Returns:
        Counts over all ranks on the last pipeline stage, which alone computes a loss; those before exclusion elsewhere.
    """
    before = _before_exclusion(minibatch)
    loss = MegatronActorLoss(
        config, model=model, minibatch=minibatch, groups=groups, logprobs=logprobs, denominators=before
    )
    with torch.no_grad(), evaluating(model):
        found = run_schedule(model, minibatch, loss.count_step, forward_only=True)
    if not groups.is_last_stage:
        return before
    tokens, sequences, positive = global_counts(torch.stack(found).sum(0), groups.data_context).tolist()
    return Denominators(
        tokens=tokens or before.tokens,
        sequences=sequences or before.sequences,
        positive_tokens=positive or before.positive_tokens,
    )


def counted_actor_loss(
    config: ActorLossConfig,
    *,
    model: ModelParts,
    minibatch: Minibatch,
    groups: ParallelGroups,
    logprobs: LogprobConfig | None = None,
) -> MegatronActorLoss:
    """The loss of a minibatch, after the pass of :func:`count_survivors` where the configuration needs one.

    Arguments and errors as for :class:`MegatronActorLoss`.
    """
    denominators = None
    if counts_ahead(config):
        denominators = count_survivors(config, model=model, minibatch=minibatch, groups=groups, logprobs=logprobs)
    return MegatronActorLoss(
        config, model=model, minibatch=minibatch, groups=groups, logprobs=logprobs, denominators=denominators
    )


def _detached(values: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        filtered=values.filtered.detach(),
        unfiltered=values.unfiltered.detach(),
        entropy=None if values.entropy is None else values.entropy.detach(),
        in_support=values.in_support,
    )
