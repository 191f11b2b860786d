"""The loop behind ``megatron-support train``."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from megatron_support.config.recipe import Recipe
from megatron_support.distributed.errors import raise_together
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError, RolloutError
from megatron_support.megatron.actor_step import StepResult
from megatron_support.megatron.checkpoint import save_checkpoint
from megatron_support.megatron.host import Host, running_host
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.training.build import Training, build_training
from megatron_support.training.checks import CheckedRecipe, check_recipe
from megatron_support.training.environment import describe_environment
from megatron_support.training.exclusions import Exclusions, count_exclusions
from megatron_support.training.folder import CHECKPOINT, RunFolder
from megatron_support.training.progress import ProgressView, SilentProgress, Values, make_progress
from megatron_support.training.summary import Summary, print_summary
from megatron_support.training.token_record import record_tokens
from megatron_support.training.token_text import plain_token_text, token_text
from megatron_support.training.watch import Watch


def train(recipe: Recipe, console: Console) -> Summary:
    """Train as a recipe says, on the ranks that torchrun started, or on this one. Collective.

    Everything is checked and built before the run folder is made, which is when the first step has been done.

    Args:
        recipe: from :func:`megatron_support.config.load_recipe`.
        console: where the first rank shows progress and the summary.

    Raises:
        ConfigurationError, RolloutError, LogprobFault: on every rank with the same message.
    """
    with running_host(recipe.device) as host:
        checked = _check_together(recipe, host)
        groups = initialize_parallel(recipe.parallel)
        view = _LateView()
        training = build_training(checked, groups, view.phase)
        folder = _folder_together(recipe, groups, host)
        folder.environment = describe_environment(groups, host.device)
        if groups.is_main:
            _say(console, f"{recipe.name}: {_describe(checked, groups, host)}")
        view.view = make_progress(recipe.logging.progress, recipe.train.steps, console, main=groups.is_main)
        try:
            history = _loop(recipe, training, folder, view)
        finally:
            view.close()
            folder.close()
        if recipe.train.save_final:
            save_checkpoint(folder.path / CHECKPOINT, training.model, step=recipe.train.steps)
        summary = history.summary(recipe, folder)
        if groups.is_main:
            folder.write_rollouts(history.results[-1].rollouts)
            folder.write_summary(summary.to_dict())
            tokens = {*history.excluded_tokens, *history.results[-1].rollouts.tokens.tolist()}
            folder.write_token_text(plain_token_text(recipe.model.weights, checked.task), tokens)
            print_summary(summary, console, token_text(recipe.model.weights, checked.task))
        return summary


@dataclass
class _History:
    """What the steps leave behind for the summary."""

    rewards: list[float] = field(default_factory=list)
    mismatches: list[float] = field(default_factory=list)
    exclusions: Exclusions = field(default_factory=Exclusions)
    results: deque[StepResult] = field(default_factory=lambda: deque(maxlen=1))
    """The last one alone: a result holds the rollouts."""
    excluded_tokens: set[int] = field(default_factory=set)
    """Ids, for their text."""

    def add(self, step: int, result: StepResult, *, epochs: int) -> dict[str, Any]:
        """Take a step in; returns what its single tokens say."""
        metrics, rollouts = result.metrics, result.rollouts
        self.results.append(result)
        self.rewards.append(float(rollouts.rewards.mean()))
        if "token_mult_prob_error" in metrics:
            self.mismatches.append(metrics["token_mult_prob_error"])
        if "excluded_by_previous" not in metrics:  # the loss does not read them, whatever they are
            rollouts = rollouts.with_columns(prev_logprobs=None)
        excluded = int(metrics.get("policy_support_excluded_tokens", 0))
        self.exclusions += count_exclusions(step, rollouts, excluded=excluded, epochs=epochs)
        record = record_tokens(step, rollouts)
        self.excluded_tokens.update(int(token) for token in record["tokens"])
        return record

    def summary(self, recipe: Recipe, folder: RunFolder) -> Summary:
        return Summary(
            recipe=recipe,
            rewards=self.rewards,
            exclusions=self.exclusions,
            mismatch=sum(self.mismatches) / len(self.mismatches) if self.mismatches else None,
            last=self.results[-1].metrics,
            folder=folder.path,
        )


def _loop(recipe: Recipe, training: Training, folder: RunFolder, view: ProgressView) -> _History:
    """All steps."""
    history, watch = _History(), Watch(recipe, training)
    for step in range(1, recipe.train.steps + 1):
        watch.profiler.before(step)
        start = time.perf_counter()
        with torch.profiler.record_function("megatron_support/rollouts"):
            rollouts = training.source.rollouts(step - 1)
        sampled = time.perf_counter()
        result = training.actor_step.step(rollouts)
        end = time.perf_counter()
        tokens = history.add(step, result, epochs=recipe.train.epochs)
        values = {
            "reward": history.rewards[-1],
            "response_length": float(rollouts.response_mask.sum()) / rollouts.num_sequences,
            "tokens_per_second": rollouts.tokens.numel() / (end - start),
            "seconds": end - start,
            "seconds/rollouts": sampled - start,
            **result.metrics,
            **watch.values(rollouts, result.metrics),
        }
        if training.actor_step.groups.is_main:
            folder.write_step(step, values)
            if recipe.logging.tokens:
                folder.write_tokens(tokens)
        watch.profiler.after(step, folder.path)
        view.step(step, values)
    return history


class _LateView:
    """A view that can be handed out before it is known: nothing is shown while the model is built."""

    def __init__(self) -> None:
        self.view: ProgressView = SilentProgress()

    def phase(self, name: str, done: int, total: int) -> None:
        self.view.phase(name, done, total)

    def step(self, step: int, values: Values) -> None:
        self.view.step(step, values)

    def close(self) -> None:
        self.view.close()


def _check_together(recipe: Recipe, host: Host) -> CheckedRecipe:
    """Checks read files, which may differ between machines: one rank's error is everybody's."""
    checked, error = None, None
    try:
        checked = check_recipe(recipe, dist.get_world_size())
    except (ConfigurationError, RolloutError) as found:
        error = found
    raise_together(error, dist.group.WORLD, host.device)
    assert checked is not None
    return checked


def _folder_together(recipe: Recipe, groups: ParallelGroups, host: Host) -> RunFolder:
    """The first rank names the run folder; the others learn the name."""
    folder, error = None, None
    try:
        folder = RunFolder(recipe)
    except ConfigurationError as found:
        error = found
    raise_together(error, groups.world, host.device)
    assert folder is not None
    if groups.world is not None:
        box = [folder.path]
        dist.broadcast_object_list(box, src=0, device=host.device)
        folder.path = box[0]
    return folder


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
