"""A checked recipe -> model, optimizer, actor step and rollout source on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_support.config.recipe import Recipe, Weights
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.actor_step import ActorStep
from megatron_support.megatron.communication import CommunicationClock
from megatron_support.megatron.generate import Sampler
from megatron_support.megatron.model import build_model, wrap_ddp
from megatron_support.megatron.optimizer import build_optimizer
from megatron_support.megatron.parts import ModelParts
from megatron_support.megatron.reference import HostWeights
from megatron_support.megatron.weights import load_weights
from megatron_support.training.checks import CheckedRecipe
from megatron_support.training.sources import FileSource, RolloutSource, SamplerSource
from megatron_support.training.tasks import Task

OnPhase = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop drives."""

    model: ModelParts
    actor_step: ActorStep
    source: RolloutSource
    communication: CommunicationClock
    task: Task | None
    """None where rollouts come from files."""


def build_training(checked: CheckedRecipe, groups: ParallelGroups, on_phase: OnPhase) -> Training:
    """Build everything a run needs. Collective.

    Raises:
        ConfigurationError: weights that cannot be read, or a learning-rate schedule that is all warmup.
    """
    recipe = checked.recipe
    model = wrap_ddp(
        build_model(recipe.model, recipe.parallel, groups, seed=recipe.seed),
        distributed_optimizer=recipe.optimizer.distributed,
        overlap_grad_reduce=recipe.optimizer.overlap_grad_reduce,
        overlap_param_gather=recipe.optimizer.overlap_param_gather,
    )
    reference = teacher = None
    if recipe.actor_step.needs_reference:
        reference = _weights_of(recipe.reference.checkpoint, recipe, model, groups)
    if recipe.teacher.checkpoint is not None:
        teacher = _weights_of(recipe.teacher.checkpoint, recipe, model, groups)
    train = recipe.train
    optimizer, scheduler = build_optimizer(
        recipe.optimizer, model.chunks, total_steps=train.steps * train.epochs * train.minibatches
    )
    actor_step = ActorStep(
        model,
        optimizer,
        scheduler,
        recipe.actor_step,
        groups=groups,
        reference=reference,
        teacher=teacher,
        on_phase=on_phase,
        keep_current=recipe.logging.tokens,
    )
    clock = CommunicationClock(model.device)
    model.config.timers = optimizer.config.timers = clock
    source = _source(checked, model, groups, on_phase)
    return Training(model=model, actor_step=actor_step, source=source, communication=clock, task=checked.task)


def _weights_of(checkpoint: Weights | None, recipe: Recipe, model: ModelParts, groups: ParallelGroups) -> HostWeights:
    """Those of a checkpoint, or of the start of the run; the model keeps its own."""
    start = HostWeights(model.chunks)
    if checkpoint is None:
        return start
    load_weights(model, checkpoint, groups=groups, seed=recipe.seed)
    loaded = HostWeights(model.chunks)
    start.copy_to(model.chunks)
    return loaded


def _source(checked: CheckedRecipe, model: ModelParts, groups: ParallelGroups, on_phase: OnPhase) -> RolloutSource:
    recipe, rollouts = checked.recipe, checked.recipe.rollouts
    if rollouts.type == "files":
        assert checked.rollouts is not None
        return FileSource(checked.rollouts, rollouts.sequences_per_step)
    assert checked.task is not None
    microbatch = recipe.train.microbatch
    sampler = Sampler(
        model,
        recipe.parallel,
        groups,
        dtype=rollouts.weights_dtype,
        max_tokens=microbatch.max_tokens_forward or microbatch.max_tokens,
        transformer_impl=recipe.model.transformer_impl,
    )
    return SamplerSource(
        checked.task,
        sampler,
        rollouts,
        seed=recipe.seed,
        record_support=recipe.logprobs.support == "replay",
        on_phase=on_phase,
    )
