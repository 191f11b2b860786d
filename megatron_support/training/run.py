"""The loop behind ``megatron-support train``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from megatron_support.config.recipe import Recipe
from megatron_support.distributed.board import one_error
from megatron_support.distributed.errors import decide_together
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import CheckpointError, Fault
from megatron_support.megatron.checkpoint import load_checkpoint, save_checkpoint
from megatron_support.megatron.host import Host, running_host
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.training.build import OnPhase, Training, build_training
from megatron_support.training.checkpoints import Checkpoints
from megatron_support.training.checks import CheckedRecipe, check_recipe
from megatron_support.training.disk import Disk
from megatron_support.training.environment import describe_environment
from megatron_support.training.folder import RunFolder
from megatron_support.training.history import History
from megatron_support.training.progress import ProgressView, SilentProgress, Values, make_progress
from megatron_support.training.recipe_changes import recipe_changes
from megatron_support.training.resume import Start, find_start, launch_id
from megatron_support.training.saved import CHECKPOINT
from megatron_support.training.stop import StopSignals
from megatron_support.training.summary import Summary, print_summary
from megatron_support.training.token_text import plain_token_text, token_text
from megatron_support.training.watch import Watch


def train(recipe: Recipe, console: Console, *, on_phase: OnPhase | None = None) -> Summary:
    """Train as a recipe says, on the ranks that torchrun started, or on this one. Collective.

    Everything is checked and built before the run folder is made, which is when the first step has been done. With
    ``checkpoint.every`` a run goes on from its last checkpoint, and a signal ends it after the present step.

    Args:
        recipe: from :func:`megatron_support.config.load_recipe`.
        console: where the first rank shows progress and the summary.
        on_phase: called on every rank as ``(phase, done, total)``, and as ``("checkpoint", 0, 1)`` before one is saved.

    Raises:
        ConfigurationError, RolloutError, LogprobFault, CheckpointError: on every rank with the same message.
    """
    timeout = timedelta(minutes=recipe.timeout_minutes)
    signalled = StopSignals(enabled=recipe.checkpoint.every is not None)
    with running_host(recipe.device, timeout=timeout) as host, one_error(device=host.device), signalled as signals:
        checked = decide_together(lambda: check_recipe(recipe, dist.get_world_size()), device=host.device)
        groups = initialize_parallel(recipe.parallel, timeout=timeout)
        view = _LateView(on_phase)
        training = build_training(checked, groups, view.phase)
        start, folder = _start_together(recipe, groups, host)
        history, done, saved_recipe = _load(start, training)
        folder.environment = {**describe_environment(groups, host.device), "launch": launch_id()}
        say = (lambda line: _say(console, line)) if groups.is_main else (lambda line: None)
        say(f"{recipe.name}: {_describe(checked, groups, host)}")
        for note in checked.notes:
            say(note)
        if start.checkpoint is not None:
            say(f"goes on after step {done} of {start.checkpoint}")
            for line in recipe_changes(saved_recipe, recipe) if groups.is_main and saved_recipe else []:
                say(line)
        disk = Disk(recipe, groups, host.device, say)
        checkpoints = Checkpoints(recipe, training, disk, folder.path, start=done if start.run else 0)
        checkpoints.check()
        if start.run is not None:
            disk.write(lambda: folder.go_on(done))
        view.view = make_progress(recipe.logging.progress, recipe.train.steps, console, main=groups.is_main)
        loop = _Loop(recipe, training, folder, view, checkpoints, disk, signals, history)
        try:
            done, signal = loop.run(done)
        finally:
            view.close()
            folder.close()
        summary = history.summary(recipe, folder.path)
        if signal is not None:
            disk.write(lambda: folder.write_stopped(signal, done))
            say(f"{signal}: stopped after step {done} of {recipe.train.steps}; the same command goes on from there")
        else:
            disk.write(lambda: folder.write_summary(summary.to_dict()))
            if groups.is_main:
                print_summary(summary, console, token_text(recipe.model.weights, checked.task))
        return summary


@dataclass(frozen=True)
class _Loop:
    """All steps, and what is written at the end of them."""

    recipe: Recipe
    training: Training
    folder: RunFolder
    view: _LateView
    checkpoints: Checkpoints
    disk: Disk
    signals: StopSignals
    history: History

    def run(self, done: int) -> tuple[int, str | None]:
        """Do the steps after ``done``; returns how many are done then, and the signal that ended it before the last."""
        recipe, watch = self.recipe, Watch(self.recipe, self.training)
        signal = None
        for step in range(done + 1, recipe.train.steps + 1):
            signal = self.signals.agreed(self.training.model.device)
            if signal is not None:
                break
            self._step(step, watch)
            done = step
            self.checkpoints.after_step(step, self.history.to_dict)
        if signal is None:
            self._write_end()
        self.checkpoints.last(done, self.history.to_dict)
        return done, signal

    def _reported(self, step: int, fault: Fault) -> Fault:
        """The same fault with its step, and with a file of the samples at fault. Collective."""
        message = f"step {step}: {fault}"
        if fault.rollouts is not None:
            path = self.folder.fault_path(step)
            try:
                self.disk.write(lambda: self.folder.write_fault(step, fault.rollouts))
                message += f"\nthe samples at fault are in {path}; look at them with: megatron-support replay {path}"
            except CheckpointError as error:
                message += f"\nthe samples at fault could not be kept: {error}"
        return type(fault)(message, rollouts=fault.rollouts)

    def _step(self, step: int, watch: Watch) -> None:
        training, history = self.training, self.history
        watch.profiler.before(step)
        start = time.perf_counter()
        with torch.profiler.record_function("megatron_support/rollouts"):
            rollouts = training.source.rollouts(step - 1)
        sampled = time.perf_counter()
        try:
            result = training.actor_step.step(rollouts)
        except Fault as fault:
            raise self._reported(step, fault) from fault
        end = time.perf_counter()
        tokens = history.add(step, result, epochs=self.recipe.train.epochs)
        values = {
            "reward": history.rewards[-1],
            "response_length": float(rollouts.response_mask.sum()) / rollouts.num_sequences,
            "tokens_per_second": rollouts.tokens.numel() / (end - start),
            "seconds": end - start,
            "seconds/rollouts": sampled - start,
            **result.metrics,
            **watch.values(rollouts, result.metrics),
        }

        def write() -> None:
            self.folder.write_step(step, values)
            if self.recipe.logging.tokens:
                self.folder.write_tokens(tokens)
            watch.profiler.after(step, self.folder.path)

        self.disk.write(write)
        self.view.step(step, values)

    def _write_end(self) -> None:
        """What belongs to the last step, before its checkpoint says that it is done."""
        recipe, history = self.recipe, self.history
        rollouts = history.rollouts
        if rollouts is not None:
            text = plain_token_text(recipe.model.weights, self.training.task)
            tokens = {*history.excluded_tokens, *rollouts.tokens.tolist()}
            self.disk.write(lambda: self.folder.write_rollouts(rollouts))
            self.disk.write(lambda: self.folder.write_token_text(text, tokens))
        weights = self.folder.path / CHECKPOINT
        if recipe.train.save_final and not self.disk.agreed(weights.exists()):  # there already where the end was killed
            self.disk.tolerate(lambda: save_checkpoint(weights, self.training.model, step=recipe.train.steps))


class _LateView:
    """A view that can be handed out before it is known: nothing is shown while the model is built."""

    def __init__(self, on_phase: OnPhase | None) -> None:
        self.view: ProgressView = SilentProgress()
        self._on_phase = on_phase

    def phase(self, name: str, done: int, total: int) -> None:
        self.view.phase(name, done, total)
        if self._on_phase is not None:
            self._on_phase(name, done, total)

    def step(self, step: int, values: Values) -> None:
        self.view.step(step, values)

    def close(self) -> None:
        self.view.close()


def _start_together(recipe: Recipe, groups: ParallelGroups, host: Host) -> tuple[Start, RunFolder]:
    """The first rank finds what is continued and names the run folder; the others learn it."""

    def find() -> tuple[Start, RunFolder]:
        start = find_start(recipe) if groups.is_main else Start()
        return start, RunFolder(recipe, start.run)

    start, folder = decide_together(find, device=host.device)
    box: list[Any] = [start, folder.path]
    if groups.world is not None:
        dist.broadcast_object_list(box, src=0, device=host.device)
    start, folder.path = box
    return start, folder


def _load(start: Start, training: Training) -> tuple[History, int, Mapping[str, Any]]:
    """What the run has behind it: history, steps, and the recipe of the checkpoint (empty where it has none)."""
    if start.checkpoint is None:
        return History(), 0, {}
    step = training.actor_step
    saved = load_checkpoint(start.checkpoint, training.model, optimizer=step.optimizer, scheduler=step.scheduler)
    step.steps = saved.step
    history = History.from_dict(saved.progress) if saved.progress else History()
    return history, saved.step, saved.progress.get("recipe", {})


def _describe(checked: CheckedRecipe, groups: ParallelGroups, host: Host) -> str:
    sizes = {
        "tensor": groups.tensor_size,
        "pipeline": groups.pipeline_size,
        "context": groups.context_size,
        "data": groups.data_size,
    }
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no parallelism"
    architecture, recipe = checked.architecture, checked.recipe
    model = f"{architecture.num_layers} layers of {architecture.hidden_size}, {recipe.model.dtype}"
    ranks = f"{groups.world_size} {'GPU' if host.uses_gpu else 'CPU'} rank{'s' if groups.world_size > 1 else ''}"
    return f"{model}; {ranks} ({layout}); {recipe.train.steps} steps of {recipe.sequences_per_step} sequences"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
