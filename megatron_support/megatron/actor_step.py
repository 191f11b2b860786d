"""One actor step: previous pass -> reference pass -> advantages -> minibatches -> optimizer -> metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_support.advantages import compute_advantages
from megatron_support.config.advantages import Advantages
from megatron_support.config.recipe import ActorStepConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.faults import (
    CURRENT_COLUMNS,
    FoundFaults,
    LeftOut,
    check_replayed,
    find_minibatch_faults,
    find_rollout_faults,
)
from megatron_support.megatron.forward import RolloutLogprobs, compute_logprobs, with_support_mode
from megatron_support.megatron.gather import gather_logprobs
from megatron_support.megatron.loss_function import MicrobatchRecord, counted_actor_loss
from megatron_support.megatron.minibatch import prepare_minibatch, token_multiples, truncate_rollouts
from megatron_support.megatron.model_losses import check_actor_loss, check_model
from megatron_support.megatron.parts import ModelParts, gather_parameters
from megatron_support.megatron.reference import HostWeights
from megatron_support.megatron.same_rollouts import check_same_rollouts
from megatron_support.megatron.scaling import survivor_rescale
from megatron_support.megatron.schedule import run_schedule
from megatron_support.megatron.step_metrics import minibatch_outcome
from megatron_support.metrics import Mean, MetricSet, Sum
from megatron_support.rollouts.batch import RolloutBatch, ragged_arange
from megatron_support.rollouts.minibatch import split_minibatches
from megatron_support.rollouts.sequence_filter import filter_errors, mask_cut_off

Phase = Callable[[str, int, int], None]

LOSS_COLUMNS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What :meth:`ActorStep.step` returns, the same on every rank."""

    metrics: dict[str, float]
    """Reduced over microbatches, minibatches and ranks; ``seconds/<phase>`` are this rank's."""
    rollouts: RolloutBatch
    """With prev_logprobs, reference_logprobs and advantages filled in; and :data:`CURRENT_COLUMNS` where kept."""


@dataclass
class _Clock:
    """Seconds per named phase on this rank."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with torch.profiler.record_function(f"megatron_support/{name}"):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class ActorStep:
    """The actor step of reinforcement learning on a Megatron-Core model.

    Args:
        model: this rank's chunks, wrapped in Megatron's DistributedDataParallel.
        optimizer: Megatron's optimizer over those chunks.
        scheduler: Megatron's OptimizerParamScheduler, or None for a fixed learning rate.
        config: loss, advantages, microbatching.
        groups: the ranks' layout.
        reference: weights of the reference policy. Only a KL term needs them; see ``ActorStepConfig.needs_reference``.
        teacher: weights of the teacher of ``opd`` advantages; None: rollouts carry ``teacher_logprobs``.
        on_phase: called on every rank as ``(phase, done, total)``, for progress.
        keep_current: fill :data:`CURRENT_COLUMNS` of the result, for reports; one more collective a minibatch.

    Raises:
        ConfigurationError: the configuration needs a reference policy and none is given, or the loss cannot be combined
            with the model's own.
    """

    def __init__(
        self,
        model: ModelParts,
        optimizer: Any,
        scheduler: Any,
        config: ActorStepConfig,
        *,
        groups: ParallelGroups,
        reference: HostWeights | None = None,
        teacher: HostWeights | None = None,
        on_phase: Phase | None = None,
        keep_current: bool = False,
    ) -> None:
        if config.needs_reference and reference is None:
            raise ConfigurationError(
                "a KL term (loss.kl, advantages.kl_in_reward) needs a reference policy, got none; pass "
                "reference=HostWeights(model.chunks), or set it to null"
            )
        check_model(model.config)
        check_actor_loss(config.loss, model.config)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.config = config
        self.groups = groups
        self.reference = reference
        self.teacher = teacher
        self.on_phase = on_phase or (lambda name, done, total: None)
        self.keep_current = keep_current
        self.steps = 0

    def step(self, rollouts: RolloutBatch) -> StepResult:
        """Train on one batch of rollouts.

        Every rank passes the same batch.

        Raises:
            RolloutError: the batch differs between ranks; a sequence is longer than the token budget, which does not
                truncate; or a kept set does not fit its token.
            ConfigurationError: it truncates, at a length that this layout cannot hold.
            Fault: a log-probability or the gradient norm is not finite where it must be and ``on_fault`` is ``raise``,
                on every rank with the same message. Weights and optimizer are as they were before the minibatch in
                which it was found.
        """
        clock = _Clock()
        check_same_rollouts(rollouts, self.config.loss, self.groups, self.model.device)
        rollouts, metrics = mask_cut_off(with_support_mode(rollouts, self.config.logprobs), self.config.sequence_filter)
        rollouts, cut = self._truncated(rollouts)
        metrics |= {"truncated_sequences": Sum(cut)} if self.config.microbatch.truncate else {}
        check_replayed(rollouts, self.model.architecture.vocab_size)
        with clock.phase("previous"):
            rollouts = self._with_previous(rollouts)
        rollouts, found = filter_errors(rollouts, self.config.sequence_filter)
        metrics |= found
        with clock.phase("reference"):
            rollouts = self._with_reference(rollouts)
        if self.teacher is not None:
            with clock.phase("teacher"):
                rollouts = self._with_teacher(rollouts, self.teacher)
        left_out = LeftOut(self.config.on_fault, rollouts.num_sequences)
        faults = find_rollout_faults(rollouts, self.config.loss)
        if faults is not None:
            left_out.take(faults)
            rollouts = left_out.mask(rollouts)
        rollouts = with_advantages(rollouts, self.config.advantages)
        current = {name: torch.zeros(rollouts.tokens.numel()) for name in self._kept_columns}
        with clock.phase("update"):
            total = self.config.epochs * self.config.minibatches
            for done, indices in enumerate(self._minibatch_indices(rollouts.num_sequences)):
                self.on_phase("update", done, total)
                found, values, indices = self._minibatch(rollouts, indices, left_out)
                metrics = metrics.merge(found)
                rows = ragged_arange(rollouts.cu_seqlens[indices], rollouts.lengths[indices])
                for name, column in values.items():
                    current[name][rows] = column
            gather_parameters(self.model)
            self.on_phase("update", total, total)
        self.steps += 1
        metrics |= left_out.metrics
        rollouts = left_out.mask(rollouts)
        numbers = metrics.compute() | {f"seconds/{name}": value for name, value in clock.seconds.items()}
        return StepResult(metrics=numbers, rollouts=rollouts.with_columns(**(dict.fromkeys(CURRENT_COLUMNS) | current)))

    def _truncated(self, rollouts: RolloutBatch) -> tuple[RolloutBatch, int]:
        _, total_multiple = token_multiples(
            context_size=self.groups.context_size,
            tensor_size=self.groups.tensor_size,
            sequence_parallel=self.model.config.sequence_parallel,
        )
        return truncate_rollouts(rollouts, self.config.microbatch, total_multiple=total_multiple)

    def _minibatch_indices(self, num_sequences: int) -> Iterator[Tensor]:
        for epoch in range(self.config.epochs):
            seed = self.config.seed + self.steps * self.config.epochs + epoch if self.config.shuffle else None
            yield from split_minibatches(num_sequences, self.config.minibatches, seed=seed)

    def _with_previous(self, rollouts: RolloutBatch) -> RolloutBatch:
        if not self.config.needs_previous:
            return rollouts
        self.on_phase("previous", 0, 1)
        previous = self._logprobs(rollouts)
        return rollouts.with_columns(
            prev_logprobs=previous.filtered,
            prev_logprobs_unfiltered=previous.unfiltered,
        )

    def _with_reference(self, rollouts: RolloutBatch) -> RolloutBatch:
        if self.reference is None or not self.config.needs_reference:
            return rollouts
        self.on_phase("reference", 0, 1)
        with self.reference.swapped_into(self.model.chunks):
            reference = self._logprobs(rollouts.without_filters())
        return rollouts.with_columns(reference_logprobs=reference.unfiltered)

    def _with_teacher(self, rollouts: RolloutBatch, weights: HostWeights) -> RolloutBatch:
        self.on_phase("teacher", 0, 1)
        with weights.swapped_into(self.model.chunks):
            teacher = self._logprobs(rollouts.without_filters())
        return rollouts.with_columns(teacher_logprobs=teacher.unfiltered)

    def _logprobs(self, rollouts: RolloutBatch) -> RolloutLogprobs:
        return compute_logprobs(
            self.model,
            rollouts,
            groups=self.groups,
            microbatch=self.config.microbatch,
            logprobs=self.config.logprobs,
        )

    @property
    def _kept_columns(self) -> tuple[str, ...]:
        """What the loss saw of the current policy and a result keeps."""
        if not self.keep_current:
            return ()
        return CURRENT_COLUMNS if self.config.loss.entropy_coef > 0 else CURRENT_COLUMNS[:2]

    def _minibatch(
        self, rollouts: RolloutBatch, indices: Tensor, left_out: LeftOut
    ) -> tuple[MetricSet, dict[str, Tensor], Tensor]:
        """One optimizer step on some sequences, or on those of them without a fault.

        Returns:
            Metrics, the columns that are kept, and the sequences they are about.
        """
        while True:
            indices = indices[~left_out.sequences[indices]]
            if not indices.numel():
                return self._apply(0, left_out), {}, indices
            result = self._update(rollouts.select(indices), left_out)
            if not isinstance(result, FoundFaults):
                return (*result, indices)
            left_out.take(result, indices)

    def _update(self, rollouts: RolloutBatch, left_out: LeftOut) -> tuple[MetricSet, dict[str, Tensor]] | FoundFaults:
        """One optimizer step on one minibatch; its metrics, and the columns that are kept. None with a fault."""
        minibatch = prepare_minibatch(
            rollouts,
            microbatch=self.config.microbatch,
            groups=self.groups,
            device=self.model.device,
            columns=LOSS_COLUMNS,
            virtual_pipeline=self.model.virtual_pipeline,
            sequence_parallel=self.model.config.sequence_parallel,
        )
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        loss = counted_actor_loss(
            self.config.loss, model=self.model, minibatch=minibatch, groups=self.groups, logprobs=self.config.logprobs
        )
        records = run_schedule(self.model, minibatch, loss.forward_step, forward_only=False)
        outcome = minibatch_outcome(records, loss, self.groups, self.model.device)
        if outcome.faults:
            return find_minibatch_faults(records, loss, rollouts, self.groups)
        value = outcome.loss
        if loss.survivors:
            rescale = survivor_rescale(
                survivors=outcome.survivors, rollout_count=loss.rollout_count, already_divided=loss.per_token
            )
            for chunk in self.model.chunks:
                chunk.scale_gradients(rescale)  # type: ignore[operator]
            value /= outcome.survivors or loss.rollout_count or 1
        metrics = outcome.metrics | {"loss": Mean(value, 1)} | self._apply(minibatch.valid_tokens, left_out)
        return metrics, self._current(records, rollouts)

    def _current(self, records: list[MicrobatchRecord], rollouts: RolloutBatch) -> dict[str, Tensor]:
        names = self._kept_columns
        if not names:
            return {}
        pieces = [(record.batch, record.logprobs) for record in records]
        entropy = "entropy" in names
        values = gather_logprobs(pieces, rollouts.tokens.numel(), self.groups, self.model.device, entropy=entropy)
        return {name: column for name, column in zip(CURRENT_COLUMNS, values, strict=True) if column is not None}

    def _grad_norm(self) -> float:
        """Global, before clipping; the same on every rank, so all of them go on or none."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def _apply(self, valid_tokens: int, left_out: LeftOut) -> MetricSet:
        """The optimizer step, skipped (and counted) where no rank holds a valid token, or the gradient has a fault."""
        rate = max(group["lr"] for group in self.optimizer.param_groups)
        applied, grad_norm = False, 0.0
        if valid_tokens > 0:
            grad_norm = self._grad_norm()
            if math.isfinite(grad_norm):
                applied, _, _ = self.optimizer.step()
            else:
                left_out.take_gradient(grad_norm)
        if applied and self.scheduler is not None:
            self.scheduler.step(increment=1)
        return MetricSet(
            {
                "lr": Mean(rate, 1),
                "grad_norm": Mean(grad_norm if applied else 0.0, int(applied)),
                "valid_tokens": Sum(valid_tokens),
                "skipped_updates": Sum(int(not applied)),
            }
        )


def with_advantages(rollouts: RolloutBatch, config: Advantages) -> RolloutBatch:
    """The batch with its advantages.

    Raises:
        ConfigurationError: a column that the estimator reads is missing.
    """
    advantages = compute_advantages(
        config,
        rewards=rollouts.rewards,
        group_ids=rollouts.group_ids,
        response_mask=rollouts.response_mask,
        sequence_ids=rollouts.sequence_ids,
        sample_mask=rollouts.sample_mask,
        filtered=rollouts.filtering[rollouts.sequence_ids],
        prev_logprobs=rollouts.prev_logprobs,
        prev_logprobs_unfiltered=rollouts.prev_logprobs_unfiltered,
        reference_logprobs=rollouts.reference_logprobs,
        teacher_logprobs=rollouts.teacher_logprobs,
        values=rollouts.values,
        reward_components=rollouts.reward_components,
    )
    return rollouts.with_columns(advantages=advantages)
