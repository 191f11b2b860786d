"""Which response tokens fell outside the support, by whose log-probability, for the report of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_support.rollouts.batch import RolloutBatch

WORST_KEPT = 8


@dataclass(frozen=True, kw_only=True)
class ExcludedToken:
    """One token outside the trainer's or the engine's support."""

    step: int
    sample_id: str
    position: int
    """In the sequence, from 0, prompt included."""
    token: int
    source: str
    """``previous`` or ``generation``: whose log-probability is -inf."""
    generation_logprob: float | None
    """The engine's, under the filter."""
    trainer_logprob: float | None
    """The trainer's before the step, over the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Exclusions:
    """Excluded tokens of one or more steps. A token counts once for each pass over it (epoch)."""

    previous: int = 0
    """Outside the trainer's support before the step."""
    generation: int = 0
    """Inside that, but the engine itself reports -inf."""
    current: int = 0
    """Inside both, but outside the support of the policy that earlier minibatches of the step have changed."""
    response_tokens: int = 0
    worst: tuple[ExcludedToken, ...] = field(default=())
    """The least likely by the trainer's unfiltered log-probability, at most :data:`WORST_KEPT`."""

    @property
    def total(self) -> int:
        return self.previous + self.generation + self.current

    def __add__(self, other: Exclusions) -> Exclusions:
        return Exclusions(
            previous=self.previous + other.previous,
            generation=self.generation + other.generation,
            current=self.current + other.current,
            response_tokens=self.response_tokens + other.response_tokens,
            worst=_worst((*self.worst, *other.worst)),
        )

    def sources(self) -> dict[str, int]:
        return {"previous": self.previous, "generation": self.generation, "current": self.current}


def count_exclusions(step: int, rollouts: RolloutBatch, *, excluded: int, epochs: int) -> Exclusions:
    """Tell apart the tokens that one actor step excluded.

    Args:
        step: its number, for the report.
        rollouts: after the step, with the log-probabilities it used.
        excluded: the loss's own count over all minibatches and epochs, ``policy_support_excluded_tokens``.
        epochs: passes over the rollouts.
    """
    sequence = rollouts.sequence_ids
    valid = rollouts.response_mask & rollouts.sample_mask[sequence]
    eligible = valid & rollouts.filtering[sequence]
    previous = eligible & _outside(rollouts.prev_logprobs, eligible)
    generation = eligible & _outside(rollouts.generation_logprobs, eligible) & ~previous
    known = epochs * int(previous.sum() + generation.sum())
    return Exclusions(
        previous=epochs * int(previous.sum()),
        generation=epochs * int(generation.sum()),
        current=max(0, excluded - known),
        response_tokens=epochs * int(valid.sum()),
        worst=_worst(
            _describe(step, rollouts, previous, "previous") + _describe(step, rollouts, generation, "generation")
        ),
    )


def _outside(logprobs: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if logprobs is None else logprobs == -torch.inf


def _describe(step: int, rollouts: RolloutBatch, tokens: Tensor, source: str) -> tuple[ExcludedToken, ...]:
    sequence = rollouts.sequence_ids

    def entry(values: Tensor | None, index: int) -> float | None:
        return None if values is None else float(values[index])

    return tuple(
        ExcludedToken(
            step=step,
            sample_id=rollouts.sample_ids[int(sequence[index])],
            position=index - int(rollouts.cu_seqlens[sequence[index]]),
            token=int(rollouts.tokens[index]),
            source=source,
            generation_logprob=entry(rollouts.generation_logprobs, index),
            trainer_logprob=entry(rollouts.prev_logprobs_unfiltered, index),
        )
        for index in tokens.nonzero().flatten().tolist()
    )


def _worst(tokens: tuple[ExcludedToken, ...]) -> tuple[ExcludedToken, ...]:
    unlikely = lambda token: 0.0 if token.trainer_logprob is None else token.trainer_logprob
    return tuple(sorted(tokens, key=unlikely)[:WORST_KEPT])
