"""One actor step under one layout, and what is compared of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_support.config.recipe import Architecture
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.actor_step import ActorStep
from megatron_support.megatron.forward import compute_logprobs
from megatron_support.megatron.gradients import WholeGradients, whole_gradients
from megatron_support.megatron.reference import HostWeights
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.training.build import Training, build_training
from megatron_support.training.check_layouts.layouts import Case, Layout
from megatron_support.training.check_layouts.problem import Problem, as_files
from megatron_support.training.checks import CheckedRecipe

DRIFT = 1.02
"""The trainer's weights are multiplied by it, so that they differ from the reference's and the sampler's."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one step computed."""

    loss: float
    metrics: dict[str, float]
    """Without times."""
    logprobs: Tensor
    """fp32 ``[N]``, before the step, under the filters; -inf outside the support."""
    gradients: WholeGradients | None
    """On rank 0."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model under one layout that can run several cases from the same weights."""

    problem: Problem
    training: Training
    groups: ParallelGroups
    start: HostWeights
    rollouts: RolloutBatch

    def measure(self, case: Case) -> Measurement:
        """One step from the start weights. Collective."""
        began = time.perf_counter()
        model, optimizer = self.training.model, self.training.actor_step.optimizer
        self.start.copy_to(model.chunks)
        optimizer.reload_model_params()
        config = self.problem.recipe.actor_step.model_copy(
            update={"loss": self.problem.losses[case.loss], "microbatch": case.microbatch}
        )
        step = ActorStep(
            model, optimizer, None, config, groups=self.groups, reference=self.training.actor_step.reference
        )
        result = step.step(self.rollouts)
        gradients = whole_gradients(model, self.groups)
        logprobs = result.rollouts.prev_logprobs
        if logprobs is None:
            self.start.copy_to(model.chunks)
            logprobs = compute_logprobs(
                model, self.rollouts, groups=self.groups, microbatch=case.microbatch, logprobs=config.logprobs
            ).filtered
        return Measurement(
            loss=result.metrics["loss"],
            metrics={name: value for name, value in result.metrics.items() if not name.startswith("seconds/")},
            logprobs=logprobs,
            gradients=gradients,
            seconds=time.perf_counter() - began,
        )


def build_bench(
    problem: Problem, architecture: Architecture, rollouts: RolloutBatch, layout: Layout, groups: ParallelGroups
) -> Bench:
    """Model and optimizer of a layout. Collective."""
    recipe = as_files(problem.recipe, rollouts)
    optimizer = recipe.optimizer.model_copy(update={"distributed": layout.distributed_optimizer})
    recipe = recipe.model_copy(update={"parallel": layout.parallel, "optimizer": optimizer})
    checked = CheckedRecipe(recipe=recipe, architecture=architecture, rollouts=rollouts, task=None)
    training = build_training(checked, groups, lambda name, done, total: None)
    let_drift(training)
    return Bench(
        problem=problem,
        training=training,
        groups=groups,
        start=HostWeights(training.model.chunks),
        rollouts=rollouts,
    )


@torch.no_grad()
def let_drift(training: Training) -> None:
    """Scale every weight of the trainer, in any layout alike."""
    for chunk in training.model.chunks:
        for parameter in nn.Module.parameters(chunk):
            parameter.mul_(DRIFT)
