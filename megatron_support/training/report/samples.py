"""Samples for a page: those that a person would look at first, with their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_support.rollouts.batch import RolloutBatch, shortest_decimal
from megatron_support.training.token_record import SOURCES, TokenView, view_tokens

PER_ORDER = 10
"""Samples taken from the head of each order."""

PROMPT_TOKENS, ALL_TOKENS = 200, 1500
"""Of one sample: at most so many before its first response token, and so many in all."""

_SCALES = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)


def describe_samples(rollouts: RolloutBatch, *, first: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Samples as the page's script wants them: the head of each order that it offers.

    Args:
        rollouts: with whatever columns there are.
        first: rows that are taken in any case, e.g. with odd values.
    """
    view = view_tokens(rollouts)
    facts = [_facts(rollouts, view, row) for row in range(rollouts.num_sequences)]
    orders: tuple[Callable[[int], float], ...] = (
        lambda row: -facts[row]["excluded"],
        lambda row: -(facts[row]["spread"] or 0.0),
        lambda row: -(facts[row]["mismatch"] or 0.0),
        lambda row: facts[row]["reward"],
        lambda row: -facts[row]["reward"],
        lambda row: -facts[row]["length"],
        lambda row: facts[row]["likelihood"] or 0.0,
    )
    rows = range(rollouts.num_sequences)
    chosen = dict.fromkeys([*first, *(row for order in orders for row in sorted(rows, key=order)[:PER_ORDER])])
    return [facts[row] | _tokens(rollouts, view, row) for row in chosen]


def ratio_scale(rollouts: RolloutBatch) -> float | None:
    """The ratio that gets the full colour: the smallest round one that 99% of the tokens stay within; None if none."""
    view = view_tokens(rollouts)
    if view.log_ratio is None:
        return None
    kept = view.valid & ~view.excluded
    sizes = view.log_ratio[kept].abs().sort().values
    edge = math.exp(float(sizes[int(0.99 * (len(sizes) - 1))])) if len(sizes) else 1.0
    return next((scale for scale in _SCALES if edge <= scale), _SCALES[-1])


def _facts(rollouts: RolloutBatch, view: TokenView, row: int) -> dict[str, Any]:
    start, end = rollouts.cu_seqlens[row : row + 2].tolist()
    response = rollouts.response_mask[start:end]
    kept = response & ~view.excluded[start:end]
    spread = ratios = mismatch = likelihood = None
    if view.log_ratio is not None and bool(kept.any()):
        values = view.log_ratio[start:end][kept]
        spread = float(values.abs().max())
        ratios = f"{math.exp(float(values.min())):.3g} to {math.exp(float(values.max())):.3g}"
    if rollouts.generation_logprobs is not None and bool(kept.any()):
        generation = rollouts.generation_logprobs[start:end][kept]
        likelihood = (
            float(generation[generation > -torch.inf].mean()) if bool((generation > -torch.inf).any()) else None
        )
        if rollouts.prev_logprobs is not None:
            both = rollouts.prev_logprobs[start:end][kept] - generation
            finite = both[both.isfinite()]
            mismatch = float(finite.abs().mean()) if len(finite) else None
    top_k = int(rollouts.top_k[row])
    return {
        "id": rollouts.sample_ids[row],
        "reward": round(float(rollouts.rewards[row]), 6),
        "length": int(response.sum()),
        "excluded": int(view.excluded[start:end].sum()),
        "spread": spread,
        "ratios": ratios,
        "mismatch": mismatch,
        "likelihood": likelihood,
        "sampling": f"temperature {shortest_decimal(float(rollouts.temperature[row])):g}, "
        f"top_k {top_k or 'none'}, top_p {shortest_decimal(float(rollouts.top_p[row])):g}",
    }


def _tokens(rollouts: RolloutBatch, view: TokenView, row: int) -> dict[str, Any]:
    begin, end = rollouts.cu_seqlens[row : row + 2].tolist()
    answer = int(rollouts.response_mask[begin:end].nonzero()[0])
    start = begin + max(0, answer - PROMPT_TOKENS)
    stop = min(end, start + ALL_TOKENS)
    part = slice(start, stop)
    result: dict[str, Any] = {
        "first": start - begin,
        "left_out": end - stop,
        "tokens": rollouts.tokens[part].tolist(),
        "response": rollouts.response_mask[part].int().tolist(),
        "source": [SOURCES[number] if number >= 0 else None for number in view.source[part].tolist()],
    }
    columns = {
        "gen": rollouts.generation_logprobs,
        "prev": rollouts.prev_logprobs,
        "prevAll": rollouts.prev_logprobs_unfiltered,
        "curr": rollouts.curr_logprobs,
        "advantages": rollouts.advantages,
    }
    return result | {name: _plain(values[part]) for name, values in columns.items() if values is not None}


def _plain(values: Tensor) -> list[float | str]:
    """Five digits are enough to read; -inf is ``out``."""
    return ["out" if value == -math.inf else float(f"{value:.5g}") for value in values.tolist()]
