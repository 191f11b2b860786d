"""Small rollout batches whose every entry is distinct, so that a value in the wrong place shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_support.rollouts import RolloutBatch
from megatron_support.types import RolloutSupport

COLUMNS = ("generation_logprobs", "prev_logprobs", "reference_logprobs", "values")


def make_rollouts(lengths: Sequence[int], *, prompt: int = 1, support: bool = False, **changes: Any) -> RolloutBatch:
    """Sequences of ``prompt`` prompt tokens and a response; token n is 100 + n, column c holds -(n + 1) / 64 - c.

    With ``support``, response token n was drawn from {token, token + 1000, ...}, n % 3 + 1 ids.
    """
    count, total = len(lengths), sum(lengths)
    index = torch.arange(total)
    sizes = torch.tensor(list(lengths), dtype=torch.int64)
    cu_seqlens = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    position = index - torch.repeat_interleave(cu_seqlens[:-1], sizes)
    mask = position >= prompt
    fields: dict[str, Any] = {
        "tokens": 100 + index,
        "cu_seqlens": cu_seqlens,
        "response_mask": mask,
        "rewards": torch.arange(count) / 4,
        "sample_mask": torch.arange(count) % 3 != 1,
        "group_ids": torch.arange(count) // 2,
        "temperature": torch.full((count,), 0.7),
        "top_k": torch.full((count,), 40),
        "top_p": torch.full((count,), 0.9),
        "sample_ids": tuple(f"s{i}" for i in range(count)),
        "prompts": tuple(f"prompt {i}" for i in range(count)),
        "responses": tuple(f"response {i}" for i in range(count)),
        **{name: torch.where(mask, -(index + 1) / 64 - c, 0.0) for c, name in enumerate(COLUMNS)},
    }
    if support:
        fields["support"] = _support(fields["tokens"], mask)
    return RolloutBatch(**{**fields, **changes})


def _support(tokens: torch.Tensor, mask: torch.Tensor) -> RolloutSupport:
    kept = [
        [int(token) + 1000 * i for i in range(n % 3 + 1)] if response else []
        for n, (token, response) in enumerate(zip(tokens, mask, strict=True))
    ]
    sizes = torch.tensor([0, *map(len, kept)])
    return RolloutSupport(torch.tensor([i for ids in kept for i in ids], dtype=torch.int64), sizes.cumsum(0))


def assert_same(left: RolloutBatch, right: RolloutBatch) -> None:
    """Every field of two batches is equal."""
    for name, value in vars(left).items():
        other = getattr(right, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), f"{name}: {value} != {other}"
        elif isinstance(value, RolloutSupport):
            assert torch.equal(value.token_ids, other.token_ids) and torch.equal(value.offsets, other.offsets), name
        else:
            assert value == other, f"{name}: {value!r} != {other!r}"
