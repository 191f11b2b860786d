"""What a run measures of itself beside the loss: memory, communication, utilisation, and a profile of some steps."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_support.config.recipe import ProfileConfig, Recipe
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.distributed.metrics import reduce_metrics
from megatron_support.metrics import Max, MetricSet
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.training.build import Training
from megatron_support.training.environment import device_name
from megatron_support.training.flops import peak_flops, step_flops

PROFILE = "profile"

_PASSES = ("seconds/previous", "seconds/reference", "seconds/teacher", "seconds/update")


class Watch:
    """Measures each step on every rank.

    Args:
        recipe: of the run.
        training: what the loop drives.
    """

    def __init__(self, recipe: Recipe, training: Training) -> None:
        self._recipe = recipe
        self._training = training
        self._groups: ParallelGroups = training.actor_step.groups
        self._device: torch.device = training.model.device
        self._peak = peak_flops(device_name(self._device), recipe.model, recipe.logging.peak_tflops)
        self.profiler = Profiler(recipe.train.profile if self._groups.is_main else None)

    def values(self, rollouts: RolloutBatch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Further metrics of a step that has ended. Collective.

        Args:
            rollouts: of the step.
            metrics: the actor step's.
        """
        memory = MetricSet({"memory_gib": Max(peak_memory(self._device) / 2**30)})
        values = reduce_metrics(memory, self._groups.world, self._device).compute()
        values["seconds/communication"] = self._training.communication.take()
        seconds = sum(metrics.get(name, 0.0) for name in _PASSES)
        if self._peak is not None and seconds > 0:
            flops = step_flops(
                self._training.model.architecture,
                rollouts,
                self._recipe.actor_step,
                teacher=self._recipe.teacher.checkpoint is not None,
            )
            values["mfu"] = flops / (seconds * self._peak * self._groups.world_size)
        return values


def peak_memory(device: torch.device) -> int:
    """Bytes: the accelerator's peak since the last call, or on a CPU the process's peak since its start."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        peak = module.max_memory_allocated(device)
        module.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Profiler:
    """torch's profiler over the steps of ``train.profile``; does nothing without it.

    Args:
        config: which steps; None for none.
    """

    def __init__(self, config: ProfileConfig | None) -> None:
        self._config = config
        self._running: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Step 1, 2, ... begins."""
        if self._config is not None and step == self._config.start:
            self._running = torch.profiler.profile(activities=torch.profiler.supported_activities())
            self._running.start()

    def after(self, step: int, folder: Path) -> None:
        """The step is done and the run folder is made: write the trace where it was the last one."""
        if self._config is None or self._running is None or step < self._config.stop:
            return
        self._running.stop()
        path = folder / PROFILE
        path.mkdir(exist_ok=True)
        self._running.export_chrome_trace(str(path / f"steps_{self._config.start}_{self._config.stop}.json.gz"))
        self._running = None
