"""``megatron-support score``: log-probabilities of a rollout file under a model, written back as its columns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from megatron_support.config.path_text import check_target
from megatron_support.config.recipe import Recipe
from megatron_support.distributed.board import one_error
from megatron_support.distributed.errors import decide_together
from megatron_support.errors import ConfigurationError, RolloutError
from megatron_support.megatron.forward import RolloutLogprobs, compute_logprobs
from megatron_support.megatron.host import running_host
from megatron_support.megatron.model import build_model
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.megatron.weights import load_weights
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.files import write_rollouts
from megatron_support.training.checks import check_scoring
from megatron_support.training.files import try_writing, whole_file

ROLES = {
    "previous": {"prev_logprobs": "filtered", "prev_logprobs_unfiltered": "unfiltered"},
    "current": {"curr_logprobs": "filtered", "curr_logprobs_unfiltered": "unfiltered"},
    "reference": {"reference_logprobs": "unfiltered"},
    "teacher": {"teacher_logprobs": "unfiltered"},
}
"""Whose log-probabilities they are, and the columns they fill. Reference and teacher have no filter."""


def has_filter(role: str) -> bool:
    """Whether a role's log-probabilities are under the rows' own filters."""
    return "filtered" in ROLES[role].values()


@dataclass(frozen=True, kw_only=True)
class Score:
    """What was found, the same on every rank."""

    rollouts: RolloutBatch
    """With the new columns."""
    tokens: int
    """Response tokens of sequences that take part."""
    excluded: int
    """Of them outside the support; 0 for roles without a filter."""
    mean_logprob: float
    """Over the others."""
    mismatch: float | None
    """Mean of exp|score - generation| over tokens that neither excludes (NeMo-RL's token_mult_prob_error); None
    without a filter in the score, and without generation log-probabilities."""
    seconds: float


def score(recipe: Recipe, path: str, output: str, role: str, console: Console) -> Score:
    """Score a file on the ranks that torchrun started, or on this one, and write it. Collective.

    Args:
        recipe: model, layout, log-probabilities and token budget. The weights are those of ``reference.checkpoint`` or
            ``teacher.checkpoint`` for these roles where they are given, else those of the model.
        path: the rollout file.
        output: the file to write, ``.jsonl`` or ``.parquet``; may be ``path`` itself.
        role: one of :data:`ROLES`.
        console: where the first rank says what it found.

    Raises:
        ConfigurationError, RolloutError: on every rank with the same message. ``output`` is then as it was.
    """
    timeout = timedelta(minutes=recipe.timeout_minutes)
    with running_host(recipe.device, timeout=timeout) as host, one_error(device=host.device):
        rollouts = decide_together(lambda: check_scoring(recipe, path, dist.get_world_size()), device=host.device)
        decide_together(lambda: _check_output(output), device=host.device)
        groups = initialize_parallel(recipe.parallel, timeout=timeout)
        model = build_model(recipe.model, recipe.parallel, groups, seed=recipe.seed)
        checkpoint = {"reference": recipe.reference.checkpoint, "teacher": recipe.teacher.checkpoint}.get(role)
        if checkpoint is not None:
            load_weights(model, checkpoint, groups=groups, seed=recipe.seed)
        start = time.perf_counter()
        found = compute_logprobs(
            model,
            rollouts if has_filter(role) else rollouts.without_filters(),
            groups=groups,
            microbatch=recipe.train.microbatch,
            logprobs=recipe.logprobs,
        )
        result = _score(rollouts, found, role, time.perf_counter() - start)
        decide_together(lambda: _write(output, result.rollouts) if groups.is_main else None, device=host.device)
        if groups.is_main:
            _say(result, role, output, console)
        return result


def _score(rollouts: RolloutBatch, found: RolloutLogprobs, role: str, seconds: float) -> Score:
    values = found.filtered if has_filter(role) else found.unfiltered
    valid = rollouts.response_mask & rollouts.sample_mask[rollouts.sequence_ids]
    inside = valid & (values > -torch.inf)
    mismatch = None
    if rollouts.generation_logprobs is not None and has_filter(role):
        both = inside & torch.isfinite(rollouts.generation_logprobs)
        if bool(both.any()):
            mismatch = float((values[both] - rollouts.generation_logprobs[both]).double().abs().exp().mean())
    return Score(
        rollouts=rollouts.with_columns(**{column: getattr(found, kind) for column, kind in ROLES[role].items()}),
        tokens=int(valid.sum()),
        excluded=int((valid & ~inside).sum()),
        mean_logprob=float(values[inside].double().mean()) if bool(inside.any()) else 0.0,
        mismatch=mismatch,
        seconds=seconds,
    )


def _check_output(output: str) -> None:
    """Before the model is built: hours of scoring must not end at a folder that isn't there."""
    path = Path(output)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigurationError(f"--output must end in .jsonl or .parquet, got {output}; rename it")
    try:
        check_target(path)
        try_writing(path.parent)
    except OSError as error:
        raise ConfigurationError(
            f"--output must be a file in a folder that can be written, got {output} ({error.strerror}); choose another"
        ) from None


def _write(output: str, rollouts: RolloutBatch) -> None:
    path = Path(output)
    try:
        with whole_file(path) as unfinished:  # the file may be the one that was read
            write_rollouts(unfinished, rollouts)
    except OSError as error:
        raise RolloutError(f"{path}: cannot write it ({error}); choose another --output") from None


def _say(result: Score, role: str, output: str, console: Console) -> None:
    say = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    rate = result.tokens / result.seconds if result.seconds else 0.0
    say(f"{role}: {result.tokens:,} response tokens in {result.seconds:.1f} s ({rate:,.0f} tokens/s)")
    if has_filter(role):
        say(f"outside the support: {result.excluded:,}")
    say(f"mean log-probability: {result.mean_logprob:.4f}")
    if result.mismatch is not None:
        say(f"against the generation's: token_mult_prob_error {result.mismatch:.4f}")
    say(f"written to {output}: {', '.join(ROLES[role])}")
