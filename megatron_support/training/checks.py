"""Everything about a recipe that can be known before a model is built or a folder is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_support.config.layout import validate_layout
from megatron_support.config.recipe import Architecture, FileRollouts, Recipe, SamplerRollouts
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.forward import with_support_mode
from megatron_support.megatron.minibatch import check_truncation, token_multiples
from megatron_support.megatron.weights import model_architecture
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.files import concatenate, read_rollouts
from megatron_support.rollouts.planning import plan_microbatches
from megatron_support.rollouts.readers import Assumptions, read_dump
from megatron_support.training.tasks import Task, get_task
from megatron_support.training.tracking import check_wandb


@dataclass(frozen=True, kw_only=True)
class CheckedRecipe:
    """A recipe that fits its model, its layout and its rollouts."""

    recipe: Recipe
    architecture: Architecture
    rollouts: RolloutBatch | None
    """All rows of the files; None for the sampler."""
    task: Task | None
    """None for files."""
    notes: tuple[str, ...] = ()
    """What the files have lost, and what was assumed for it."""


def check_recipe(recipe: Recipe, world_size: int) -> CheckedRecipe:
    """Check a recipe against its weights, the number of ranks and its rollouts. Needs no process group.

    Args:
        recipe: from :func:`megatron_support.config.load_recipe`.
        world_size: number of ranks.

    Raises:
        ConfigurationError: a field, or the layout.
        RolloutError: a file, or a sequence that does not fit.
    """
    check_wandb(recipe)
    architecture = model_architecture(recipe.model)
    validate_layout(architecture, recipe.parallel, world_size)
    rollouts: RolloutBatch | None = None
    task: Task | None = None
    notes: tuple[str, ...] = ()
    if isinstance(recipe.rollouts, FileRollouts):
        rollouts, notes = _read(recipe.rollouts, architecture)
        _check_known(recipe, rollouts)
        with_support_mode(rollouts, recipe.logprobs)
        lengths, names = rollouts.lengths, rollouts.sample_ids
    else:
        task = get_task(recipe.rollouts.task)
        lengths, names = _longest(task, recipe.rollouts, architecture), ("prompt and response",)
    _check_columns(recipe, rollouts)
    _check_truncation(recipe)
    if recipe.train.microbatch.truncate and rollouts is not None:
        lengths = lengths.clamp_max(recipe.train.microbatch.longest_sequence)
    _check_lengths(recipe, architecture, world_size, lengths, names)
    return CheckedRecipe(recipe=recipe, architecture=architecture, rollouts=rollouts, task=task, notes=notes)


def check_scoring(recipe: Recipe, path: str | Path, world_size: int) -> RolloutBatch:
    """Check that a recipe's model can score every token of a rollout file, and read it. Needs no process group.

    Args:
        recipe: its model, layout, log-probabilities and token budget are read.
        path: the file.
        world_size: number of ranks.

    Raises:
        ConfigurationError: a field, or the layout.
        RolloutError: the file, or a sequence that does not fit.
    """
    architecture = model_architecture(recipe.model)
    validate_layout(architecture, recipe.parallel, world_size)
    rollouts = read_rollouts(path, vocab_size=architecture.vocab_size)
    with_support_mode(rollouts, recipe.logprobs)
    _check_lengths(recipe, architecture, world_size, rollouts.lengths, rollouts.sample_ids)
    return rollouts


def _read(config: FileRollouts, architecture: Architecture) -> tuple[RolloutBatch, tuple[str, ...]]:
    """All rows, and what is to be said about the files."""
    assumptions = Assumptions(
        sampling=None if config.sampling is None else config.sampling.model_dump(),
        reward_key=config.reward_key,
        nonfinite=config.nonfinite,
    )
    dumps = [
        read_dump(path, format=config.format, assumptions=assumptions, vocab_size=architecture.vocab_size)
        for path in config.paths
    ]
    rollouts = concatenate([dump.rollouts for dump in dumps])
    notes = tuple(f"{path}: {note}" for path, dump in zip(config.paths, dumps, strict=True) for note in dump.notes)
    if config.sequences_per_step > rollouts.num_sequences:
        raise ConfigurationError(
            f"rollouts.sequences_per_step must be <= the {rollouts.num_sequences} rows of rollouts.paths, "
            f"got {config.sequences_per_step}; lower it or add files"
        )
    return rollouts, notes


def _check_known(recipe: Recipe, rollouts: RolloutBatch) -> None:
    """Nothing that the step reads may be a stand-in for what the files have lost."""
    remedies = {
        "sampling": "give rollouts.sampling",
        "rewards": "use advantages.type opd, which reads none, or files with rewards",
    }
    read = {"sampling", "generation_logprobs", *_carried(recipe)}
    if recipe.advantages.type != "opd":
        read.add("rewards")
    for name in sorted(read & rollouts.unknown_fields):
        raise ConfigurationError(
            f"rollouts.paths: {name} must be known to train with {recipe.advantages.type} advantages, and the files do "
            f"not say it; {remedies.get(name, 'take files that have it')}"
        )


def _carried(recipe: Recipe) -> list[str]:
    """Optional columns that the rollouts must carry, because the step does not compute them itself."""
    computed = {"prev_logprobs", "reference_logprobs"}
    if recipe.teacher.checkpoint is not None:
        computed.add("teacher_logprobs")
    return [name for name in recipe.advantages.columns if name not in computed]


def _check_columns(recipe: Recipe, rollouts: RolloutBatch | None) -> None:
    """``rollouts``: what the files hold; None for the sampler, whose batches have no optional column."""
    missing = [name for name in _carried(recipe) if rollouts is None or getattr(rollouts, name) is None]
    if missing:
        remedy = "add them to the files" if rollouts is not None else "take rollouts from files that have them"
        raise ConfigurationError(
            f"rollouts must carry the columns {missing} for {recipe.advantages.type} advantages, got none; {remedy}, "
            "or choose other advantages"
        )


def _longest(task: Task, config: SamplerRollouts, architecture: Architecture) -> torch.Tensor:
    if architecture.vocab_size < task.vocab_size:
        raise ConfigurationError(
            f"model.architecture.vocab_size must be >= the {task.vocab_size} tokens of the task {task.name!r}, "
            f"got {architecture.vocab_size}; raise it"
        )
    return torch.tensor([task.longest_prompt + config.max_new_tokens])


def _multiples(recipe: Recipe) -> tuple[int, int]:
    parallel = recipe.parallel
    return token_multiples(
        context_size=parallel.context, tensor_size=parallel.tensor, sequence_parallel=parallel.sequence
    )


def _check_truncation(recipe: Recipe) -> None:
    check_truncation(recipe.train.microbatch, total_multiple=_multiples(recipe)[1])


def _check_lengths(
    recipe: Recipe, architecture: Architecture, world_size: int, lengths: torch.Tensor, names: tuple[str, ...]
) -> None:
    parallel, microbatch = recipe.parallel, recipe.train.microbatch
    sequence_multiple, total_multiple = _multiples(recipe)
    longest = int(lengths.max())
    if longest > architecture.max_sequence_length:
        raise ConfigurationError(
            f"sequences must be at most model.architecture.max_sequence_length = {architecture.max_sequence_length} "
            f"tokens, got {longest} ({names[int(lengths.argmax())]}); raise it, or shorten the sequences"
        )
    for budget in {microbatch.max_tokens, microbatch.max_tokens_forward or microbatch.max_tokens}:
        plan_microbatches(
            lengths,
            max_tokens=budget,
            data_parallel_size=world_size // (parallel.tensor * parallel.pipeline * parallel.context),
            layout=microbatch.layout,
            sequence_multiple=sequence_multiple,
            total_multiple=total_multiple,
            sample_ids=names,
        )
