"""What is wrong or odd in a rollout file: rows that a reader refuses, and what is allowed but rarely meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_support.errors import RolloutError
from megatron_support.rollouts.batch import RolloutBatch

EXAMPLES = 4
UNLIKELY = -15.0
"""A sampled token that its own sampler gives less than exp(-15) is rarely right."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kind of thing."""

    level: Literal["error", "warning"]
    """error: a reader refuses the row."""
    text: str
    count: int
    """Rows."""
    examples: tuple[str, ...]
    """Names of some of the rows."""
    rows: tuple[int, ...] = ()
    """Their numbers in the batch; none for rows that could not be read."""


def find_odd(rollouts: RolloutBatch | None, errors: Sequence[RolloutError]) -> list[Finding]:
    """Errors first, each with its own message, then what is odd among the sound rows.

    Args:
        rollouts: the sound rows.
        errors: of the others.
    """
    findings = [Finding(level="error", text=str(error), count=1, examples=()) for error in errors]
    if rollouts is None:
        return findings
    for name in sorted(rollouts.unknown_fields):
        findings.append(
            Finding(
                level="warning",
                text=f"{name} is unknown: the program that wrote the rollouts had lost it",
                count=rollouts.num_sequences,
                examples=rollouts.sample_ids[:EXAMPLES],
            )
        )
    for check, text in _CHECKS:
        rows = check(rollouts).nonzero().flatten().tolist()
        if rows:
            examples = tuple(rollouts.sample_ids[row] for row in rows[:EXAMPLES])
            findings.append(
                Finding(level="warning", text=text, count=len(rows), examples=examples, rows=tuple(rows[:EXAMPLES]))
            )
    return findings


def _per_sequence(rollouts: RolloutBatch, tokens: Tensor) -> Tensor:
    """int64 ``[S]``: how many of the bool ``[N]`` tokens each sequence has."""
    counts = torch.zeros(rollouts.num_sequences, dtype=torch.int64)
    return counts.index_add_(0, rollouts.sequence_ids, tokens.long())


def _group_sizes(rollouts: RolloutBatch) -> Tensor:
    _, inverse, counts = rollouts.group_ids.unique(return_inverse=True, return_counts=True)
    return counts[inverse]


def _alone(rollouts: RolloutBatch) -> Tensor:
    return _group_sizes(rollouts) == 1


def _equal_rewards(rollouts: RolloutBatch) -> Tensor:
    _, inverse = rollouts.group_ids.unique(return_inverse=True)
    groups = int(inverse.max()) + 1
    low = torch.full((groups,), torch.inf).scatter_reduce(0, inverse, rollouts.rewards, "amin")
    high = torch.full((groups,), -torch.inf).scatter_reduce(0, inverse, rollouts.rewards, "amax")
    return (low == high)[inverse] & (_group_sizes(rollouts) > 1)


def _outside(rollouts: RolloutBatch) -> Tensor:
    assert rollouts.generation_logprobs is not None
    return _per_sequence(rollouts, rollouts.response_mask & (rollouts.generation_logprobs == -torch.inf)) > 0


def _all_zero(rollouts: RolloutBatch) -> Tensor:
    assert rollouts.generation_logprobs is not None
    other = rollouts.response_mask & (rollouts.generation_logprobs != 0)
    return (_per_sequence(rollouts, other) == 0) & (_per_sequence(rollouts, rollouts.response_mask) > 1)


def _unlikely(rollouts: RolloutBatch) -> Tensor:
    values = rollouts.generation_logprobs
    assert values is not None
    return _per_sequence(rollouts, rollouts.response_mask & (values < UNLIKELY) & (values > -torch.inf)) > 0


def _repeated(rollouts: RolloutBatch) -> Tensor:
    """Rows whose tokens an earlier row of the same group has."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    result = torch.zeros(rollouts.num_sequences, dtype=torch.bool)
    pieces = rollouts.tokens.split(rollouts.lengths.tolist())
    for row, (group, piece) in enumerate(zip(rollouts.group_ids.tolist(), pieces, strict=True)):
        key = (group, tuple(piece.tolist()))
        result[row] = key in seen
        seen.add(key)
    return result


def _too_many_kept(rollouts: RolloutBatch) -> Tensor:
    """Kept sets larger than top_k: allowed where logits tie."""
    if rollouts.support is None:
        return torch.zeros(rollouts.num_sequences, dtype=torch.bool)
    limit = rollouts.top_k[rollouts.sequence_ids]
    return _per_sequence(rollouts, (limit > 0) & (rollouts.support.offsets.diff() > limit)) > 0


def _nothing_kept(rollouts: RolloutBatch) -> Tensor:
    if rollouts.support is None:
        return torch.zeros(rollouts.num_sequences, dtype=torch.bool)
    return _per_sequence(rollouts, rollouts.response_mask & (rollouts.support.offsets.diff() == 0)) > 0


def _as_long_as_the_longest(rollouts: RolloutBatch) -> Tensor:
    """Where several prompts have responses of the greatest length, and others shorter ones, a limit has cut them."""
    lengths = _per_sequence(rollouts, rollouts.response_mask)
    longest = lengths == lengths.max()
    return longest & (rollouts.group_ids[longest].unique().numel() > 1) & ~longest.all()


def _unfiltered(rollouts: RolloutBatch) -> Tensor:
    """Where no filter was on, as far as it is known."""
    return torch.zeros_like(rollouts.filtering) if "sampling" in rollouts.unknown_fields else ~rollouts.filtering


_CHECKS: tuple[tuple[Callable[[RolloutBatch], Tensor], str], ...] = (
    (_all_zero, "every generation log-probability is 0: did the engine return them?"),
    (_outside, "a generation log-probability is -inf: the token is excluded whatever the trainer says"),
    (_unlikely, f"a generation log-probability is below {UNLIKELY:g}: is it of the sampled token?"),
    (_alone, "alone in its group: an estimator that compares samples of one prompt has nothing to compare"),
    (_equal_rewards, "equal rewards in the whole group: no advantage against the others"),
    (_as_long_as_the_longest, "as long as the longest response of several prompts: cut off by a limit?"),
    (_repeated, "the same tokens as an earlier sample of its prompt"),
    (lambda rollouts: ~rollouts.sample_mask, "sample_mask is false: it enters no term of the loss"),
    (_unfiltered, "no sampling filter: none of its tokens can be excluded"),
    (_nothing_kept, "a response token has an empty kept set"),
    (_too_many_kept, "a kept set is larger than top_k: logits that tie, or another filter than the row says"),
)
