"""The checkpoints of a run: when, where, how many are kept, and what a full disk means."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_support.config.recipe import Architecture, Recipe
from megatron_support.errors import CheckpointError
from megatron_support.megatron.checkpoint import METADATA, checkpoint_state
from megatron_support.megatron.checkpoint_writer import CheckpointWriter, remove_checkpoint, remove_unfinished
from megatron_support.megatron.weights.names import tensor_shapes
from megatron_support.training.build import Training
from megatron_support.training.disk import Disk
from megatron_support.training.files import replace_file
from megatron_support.training.saved import CHECKPOINTS, STEP, checkpoints_of

LATEST = "latest"


class Checkpoints:
    """Saves what the next steps depend on, on every rank. Every method is collective, and nothing without ``every``.

    Args:
        recipe: of the run.
        training: what is saved.
        disk: what a write error means.
        run: the run folder.
        start: steps that a checkpoint in it holds already.
    """

    def __init__(self, recipe: Recipe, training: Training, disk: Disk, run: Path, *, start: int) -> None:
        self._recipe, self._training, self._disk, self._run = recipe, training, disk, run
        self._config = recipe.checkpoint
        self._begun = start
        self._writer: CheckpointWriter | None = None
        if self._config.every is not None:
            self._writer = CheckpointWriter(training.model.device, asynchronous=self._config.async_save)

    def check(self) -> None:
        """Before training: clean up after killed writes, and see whether checkpoints will fit on the disk.

        Raises:
            CheckpointError: they will not, and ``checkpoint.on_write_error`` is raise.
        """
        if self._writer is None:
            return
        if self._disk.is_main:
            remove_unfinished(self._run / CHECKPOINTS)
        self._disk.tolerate(lambda: self._disk.raise_together(self._missing_space() if self._disk.is_main else None))

    def after_step(self, step: int, progress: Callable[[], Mapping[str, Any]]) -> None:
        """Save if it is time to, and complete what was begun before.

        Args:
            step: actor steps done.
            progress: plain values to save with it.
        """
        if self._writer is None or self._config.every is None:
            return
        self._attempt(self._writer.poll)
        if step % self._config.every == 0 and step < self._recipe.train.steps:
            self._save(step, progress)

    def last(self, step: int, progress: Callable[[], Mapping[str, Any]]) -> None:
        """Save the last step of this process, unless it has been, and wait until all is written."""
        if self._writer is None:
            return
        if step > self._begun:
            self._save(step, progress)
        self._attempt(self._writer.finish)

    def _save(self, step: int, progress: Callable[[], Mapping[str, Any]]) -> None:
        writer, training = self._writer, self._training
        assert writer is not None
        self._attempt(writer.finish)  # on its own, so that its failure does not cost this one
        state = checkpoint_state(
            training.model,
            optimizer=training.actor_step.optimizer,
            scheduler=training.actor_step.scheduler,
            step=step,
            progress={**progress(), "recipe": self._recipe.model_dump(mode="json")},
        )
        self._begun = step
        training.actor_step.on_phase("checkpoint", 0, 1)
        path = self._run / CHECKPOINTS / f"{STEP}{step}"
        self._attempt(lambda: writer.save(path, state, metadata=METADATA))

    def _attempt(self, action: Callable[[], Iterable[Path]]) -> None:
        completed: list[Path] = []
        self._disk.tolerate(lambda: completed.extend(action()))
        for path in completed:
            self._disk.write(lambda path=path: self._publish(path))  # type: ignore[misc]

    def _publish(self, path: Path) -> None:
        """Point to a checkpoint that is there, then remove the oldest."""
        replace_file(path.parent / LATEST, f"{path.name}\n")
        keep = self._config.keep_last
        for _, old in checkpoints_of(self._run)[: -keep if keep is not None else 0]:
            remove_checkpoint(old)

    def _missing_space(self) -> CheckpointError | None:
        folder = next(folder for folder in (self._run.absolute(), *self._run.absolute().parents) if folder.exists())
        every, keep = self._config.every, self._config.keep_last
        assert every is not None
        coming = math.ceil((self._recipe.train.steps - self._begun) / every)
        count = coming if keep is None else min(coming, keep + 1 - len(checkpoints_of(self._run)))
        size = checkpoint_bytes(self._training.model.architecture, self._recipe.model.dtype)
        free = shutil.disk_usage(folder).free
        if size * max(count, 1) <= free:
            return None
        gib = lambda number: f"{number / 2**30:.3g} GiB"
        return CheckpointError(
            f"{folder}: {max(count, 1)} checkpoints of {gib(size)} must fit on the disk, free are {gib(free)}; free "
            "space, lower checkpoint.keep_last, or choose another logging.run_dir"
        )


def checkpoint_bytes(architecture: Architecture, dtype: str) -> int:
    """Weights, Adam's two moments, and the fp32 main parameters that go with bfloat16 weights."""
    count = sum(math.prod(shape) for shape in tensor_shapes(architecture).values())
    return count * (2 + 12 if dtype == "bfloat16" else 4 + 8)
