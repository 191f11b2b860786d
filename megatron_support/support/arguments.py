"""Arguments of the public functions: checked, and resolved to rows and filters."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_support.support import kernels
from megatron_support.support.rows import Blocks, Rows, Workspace, split_rows, whole_rows
from megatron_support.support.selection import Filters
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.types import SamplingParams

Ties = Literal["group", "index"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_TOP_P_CANDIDATES = 128
"""Candidates per rank where top-p alone filters: enough for most rows of a language model."""

_SPARE_CANDIDATES = 32
"""Candidates per rank beyond top-k, which settle most ties at the k-th largest."""

_DEVICE_TOP_K = 256
"""The largest top-k that candidates are meant for where the numbers are on a device with kernels, per token."""

_MOST_CANDIDATES = 4096
"""A larger top-k is found by counting instead."""


def check_arguments(
    logits: Tensor, targets: Tensor, sampling: SamplingParams, ties: str, chunk_size: int | None
) -> None:
    if logits.dtype not in _FLOATS:
        raise ValueError(f"logits must be bf16, fp16, fp32 or fp64, got {logits.dtype}; convert them first")
    if logits.dim() == 0 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the logits' shape without its last dimension, got logits {tuple(logits.shape)} and "
            f"targets {tuple(targets.shape)}; logits at position j predict targets[j]"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 token ids, got {targets.dtype}; convert them with .long()")
    for name in ("temperature", "top_k", "top_p"):
        value = getattr(sampling, name)
        if isinstance(value, Tensor) and value.numel() != targets.numel():
            raise ValueError(
                f"{name} has {value.numel()} entries for {targets.numel()} tokens; give one per token, or a number"
            )
    if ties not in ("group", "index"):
        raise ValueError(f'ties must be "group" or "index", got {ties!r}; "group" keeps whole tie groups')
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 row, got {chunk_size}; use None to let it be chosen")


def check_targets(targets: Tensor, shard: VocabularyShard) -> None:
    if targets.device.type != "cpu":
        return
    wrong = (targets >= shard.size).nonzero().flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise ValueError(
            f"target {int(targets[at])} at flat position {at} is not a token id below vocab_size={shard.size}; "
            "use -1 where there is no target"
        )


def check_inplace(logits: Tensor) -> None:
    base = logits._base if logits._is_view() else logits
    if logits.requires_grad and base is not None and base.is_leaf and base.requires_grad:
        raise ValueError(
            "inplace_backward would overwrite logits that are a leaf tensor (or a view of one), which their owner "
            "still holds; pass inplace_backward=False, or logits that a module has just computed"
        )


def build_rows(
    logits: Tensor,
    wanted: Tensor,
    sampling: SamplingParams,
    shard: VocabularyShard,
    chunk_size: int | None = None,
    *,
    whole: bool = False,
) -> Rows:
    """The rows of ``logits [T, V/TP]`` where ``wanted [T]`` is true.

    Args:
        whole: whether every row is wanted, or may be taken for one: what is true need not be looked at.
    """
    dtype = compute_dtype(logits)
    if whole:
        index = torch.arange(wanted.numel(), device=wanted.device)
        chunks = whole_rows(wanted.numel(), shard.width, wanted.device, chunk_size)
    else:
        index = wanted.nonzero().flatten()
        chunks = split_rows(wanted, shard.width, chunk_size)
    return Rows(
        logits=logits[:, : shard.width],
        index=index,
        chunks=chunks,
        temperature=row_temperature(sampling, index, dtype),
        dtype=dtype,
        workspace=Workspace(logits.device),
        blocks=Blocks.of(shard.start, shard.width, shard.size),
    )


def compute_dtype(logits: Tensor) -> torch.dtype:
    """float32, or float64 for float64 logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def row_temperature(sampling: SamplingParams, index: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``[A, 1]`` of rows ``index [A]``, or ``[1, 1]`` for all alike; None where it is 1."""
    value = sampling.temperature
    if isinstance(value, Tensor):
        return _per_row(value, index, dtype)[:, None]
    return None if value == 1.0 else torch.full((1, 1), value, dtype=dtype, device=index.device)


def resolve_filters(
    sampling: SamplingParams, index: Tensor, shard: VocabularyShard, *, index_ties: bool
) -> Filters | None:
    """The filters of rows ``index [A]``; None where none is on, whatever the numbers say."""
    top_k = sampling.top_k
    top_p = sampling.top_p
    if not isinstance(top_k, Tensor) and top_k is not None and top_k >= shard.size:
        top_k = None
    k = None if top_k is None else _per_row(top_k, index, torch.int64)
    p = None if not isinstance(top_p, Tensor) and top_p >= 1.0 else _per_row(top_p, index, torch.float64)
    if k is None and p is None:
        return None
    if k is None:
        return Filters(k, p, shard.size, index_ties, _TOP_P_CANDIDATES)
    per_token = isinstance(top_k, Tensor)
    largest = _largest_top_k(top_k, k)
    alone = p is None or not per_token
    wanted = min(_DEVICE_TOP_K if largest is None else largest, _MOST_CANDIDATES) + _SPARE_CANDIDATES
    candidates = max(wanted, 0 if alone else _TOP_P_CANDIDATES)
    return Filters(k, p, shard.size, index_ties, candidates, largest is not None and largest <= candidates)


def _largest_top_k(top_k: float | Tensor | None, per_row: Tensor) -> int | None:
    """None where only the kernels' device knows, and would have to be waited for."""
    if not isinstance(top_k, Tensor):
        return None if top_k is None else int(top_k)
    known = per_row if top_k.device == per_row.device else top_k
    if kernels.runs_on(known.device):
        return None
    return int(known.max()) if known.numel() else 1


def _per_row(value: float | Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """``[A]``, the value of each row."""
    if isinstance(value, Tensor):
        return value.reshape(-1).to(device=index.device, dtype=dtype)[index]
    return torch.full((1,), value, dtype=dtype, device=index.device).expand(index.numel())
