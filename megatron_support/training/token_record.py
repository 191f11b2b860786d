"""One step's single tokens as a few numbers for the report: ratios, and which tokens were excluded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_support.rollouts.batch import RolloutBatch

SOURCES = ("previous", "generation", "current")
"""Whose log-probability is -inf; a token counts for the first of them."""

SIGNS = ("negative", "zero", "positive")
"""Of the advantage."""

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

POSITIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
"""Left edges of the bins of a token's position in its response; the last bin is open."""

TOKENS_KEPT = 40
"""Most frequent excluded token ids of one step."""


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """Flat per-token tensors ``[N]`` of a rollout batch after its step."""

    valid: Tensor
    """bool, response & sample mask."""
    source: Tensor
    """int64, index in :data:`SOURCES` of an excluded token, -1 elsewhere."""
    log_ratio: Tensor | None
    """fp32, current - previous at valid tokens that are not excluded, 0 elsewhere; None where either is unknown."""
    response_position: Tensor
    """int64, from 0 at the first response token; -1 outside responses."""

    @property
    def excluded(self) -> Tensor:
        return self.source >= 0


def view_tokens(rollouts: RolloutBatch) -> TokenView:
    """Who was excluded and by whom, and everybody else's ratio.

    Formula: ``ratio = exp(curr_logprobs - prev_logprobs)``, selected before it is computed.

    Args:
        rollouts: after the step, with the columns that the step filled.
    """
    sequence = rollouts.sequence_ids
    valid = rollouts.response_mask & rollouts.sample_mask[sequence]
    eligible = valid & rollouts.filtering[sequence]
    source = torch.full_like(rollouts.tokens, -1)
    columns = (rollouts.prev_logprobs, rollouts.generation_logprobs, rollouts.curr_logprobs)
    for number, logprobs in enumerate(columns):
        if logprobs is not None:
            source = torch.where(eligible & (logprobs == -torch.inf) & (source < 0), number, source)
    log_ratio = None
    if rollouts.curr_logprobs is not None and rollouts.prev_logprobs is not None:
        kept = valid & (source < 0)
        current, previous = (
            torch.where(kept, values, 0.0) for values in (rollouts.curr_logprobs, rollouts.prev_logprobs)
        )
        log_ratio = current - previous
    counted = rollouts.response_mask.long().cumsum(0)
    start = rollouts.cu_seqlens[:-1]
    before = torch.where(start > 0, counted[(start - 1).clamp_min(0)], 0)
    position = torch.where(rollouts.response_mask, counted - before[sequence] - 1, -1)
    return TokenView(valid=valid, source=source, log_ratio=log_ratio, response_position=position)


def record_tokens(step: int, rollouts: RolloutBatch) -> dict[str, Any]:
    """The line of ``tokens.jsonl`` of one step. Plain values, of a size that does not grow with the rollouts.

    Args:
        step: its number.
        rollouts: after the step.
    """
    view = view_tokens(rollouts)
    kept = view.valid & ~view.excluded
    ratios = None
    if view.log_ratio is not None and bool(kept.any()):
        values, _ = view.log_ratio[kept].double().sort()
        points = [values[round(q * (len(values) - 1))].exp().item() for q in QUANTILES]
        ratios = {"quantiles": [round(point, 6) for point in points]}
    return {
        "step": step,
        "response_tokens": int(view.valid.sum()),
        "excluded": _by_source_and_sign(view, rollouts.advantages),
        "positions": _by_position(view),
        "tokens": _by_token(view, rollouts.tokens),
        "ratio": ratios,
    }


def _by_source_and_sign(view: TokenView, advantages: Tensor | None) -> dict[str, dict[str, int]]:
    sign = torch.zeros_like(view.source) if advantages is None else advantages.sign().long()
    return {
        source: {name: int(((view.source == number) & (sign == value - 1)).sum()) for value, name in enumerate(SIGNS)}
        for number, source in enumerate(SOURCES)
    }


def _by_position(view: TokenView) -> dict[str, list[int]]:
    """Response tokens and excluded ones in each bin of :data:`POSITIONS`, without empty bins at the end."""
    edges = torch.tensor(POSITIONS)
    bins = torch.bucketize(view.response_position, edges, right=True) - 1

    def count(mask: Tensor) -> list[int]:
        return torch.bincount(bins[mask], minlength=len(POSITIONS)).tolist()

    total, excluded = count(view.valid), count(view.excluded)
    used = max((number + 1 for number, value in enumerate(total) if value), default=0)
    return {"total": total[:used], "excluded": excluded[:used]}


def _by_token(view: TokenView, tokens: Tensor) -> dict[str, int]:
    counts: Mapping[int, int] = Counter(tokens[view.excluded].tolist())
    return {str(token): count for token, count in Counter(counts).most_common(TOKENS_KEPT)}
