"""Triton kernels over rows of logits: sums of exponentials, and the gradient.

Both recompute the scaled logit exactly as plain torch does, by an IEEE division in float32, so that comparisons with a
threshold that torch found agree to the last bit. No atomics: equal inputs give equal results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_SPLITS = 8
"""Programs that share a row in the forward pass, each with sums of its own."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_DEPTH = tl.constexpr(-104.0)
"""exp of this is 0 in float32; bounds the distance to the maximum, so that 0 * distance is 0 at -inf."""


@triton.jit
def _sums_kernel(
    logits,
    index,
    temperature,
    maximum,
    sums,
    columns,
    row_stride,
    per_split,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(index + entry)
    top = tl.load(maximum + entry)
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    moment = tl.zeros((BLOCK,), dtype=tl.float64)
    first = split * per_split
    last = tl.minimum(first + per_split, columns)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + column, mask=column < last, other=-float("inf")).to(tl.float32)
        if SCALED:
            x = tl.div_rn(x, tl.load(temperature + entry))
        distance = x - top
        share = tl.exp2(distance * _LOG2_E)
        mass += share.to(tl.float64)
        if ENTROPY:
            bounded = tl.where(distance < _DEPTH, _DEPTH, distance)
            moment += (share * bounded).to(tl.float64)
    tl.store(sums + (entry * SPLITS + split) * 2, tl.sum(mass, 0))
    if ENTROPY:
        tl.store(sums + (entry * SPLITS + split) * 2 + 1, tl.sum(moment, 0))


@triton.jit
def _gradient_kernel(
    logits,
    out,
    index,
    temperature,
    maximum,
    threshold,
    last_tie,
    kept_weight,
    all_weight,
    entropy_weight,
    entropy_offset,
    target_column,
    target_weight,
    wanted,
    columns,
    row_stride,
    out_stride,
    SCALED: tl.constexpr,
    KEPT: tl.constexpr,
    TIES: tl.constexpr,
    ALL: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    row = tl.load(index + entry)
    gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    if tl.load(wanted + entry) != 0:  # a row without an upstream gradient is not read: it may hold NaN
        x = tl.load(logits + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            x = tl.div_rn(x, tl.load(temperature + entry))
        distance = x - tl.load(maximum + entry)
        factor = tl.zeros((BLOCK,), dtype=tl.float32)
        if ALL:
            factor += tl.load(all_weight + entry)
        if ENTROPY:
            bounded = tl.where(distance < _DEPTH, _DEPTH, distance)
            factor += (bounded + tl.load(entropy_offset + entry)) * tl.load(entropy_weight + entry)
        if KEPT:
            bar = tl.load(threshold + entry)
            kept = x >= bar
            if TIES:
                kept = kept & ((x > bar) | (column <= tl.load(last_tie + entry)))
            factor += tl.where(kept, tl.load(kept_weight + entry), 0.0)
        gradient = tl.exp2(distance * _LOG2_E) * factor
        gradient += tl.where(column == tl.load(target_column + entry), tl.load(target_weight + entry), 0.0)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=inside)


def row_sums(
    logits: Tensor, index: Tensor, temperature: Tensor | None, maximum: Tensor, *, entropy: bool, block: int = _BLOCK
) -> Tensor:
    """float64 ``[A, 1]``, the sum of e = exp(x - maximum); with entropy ``[A, 2]``, also of ``e (x - maximum)``.

    Args:
        logits: ``[T, W]`` with unit stride along W.
        index: int64 ``[A]``, rows to work on.
        temperature: float32 ``[A]``; None for 1.
        maximum: float32 ``[A]``.
        block: columns per step.
    """
    count, columns = index.numel(), logits.shape[1]
    sums = torch.zeros(count, _SPLITS, 2, dtype=torch.float64, device=logits.device)
    per_split = triton.cdiv(triton.cdiv(columns, _SPLITS), block) * block
    _sums_kernel[(count, _SPLITS)](
        logits,
        index,
        maximum if temperature is None else temperature,
        maximum,
        sums,
        columns,
        logits.stride(0),
        per_split,
        SCALED=temperature is not None,
        ENTROPY=entropy,
        SPLITS=_SPLITS,
        BLOCK=block,
    )
    return sums.sum(1)[:, : 2 if entropy else 1]


def row_gradient(
    logits: Tensor,
    out: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    maximum: Tensor,
    threshold: Tensor,
    last_tie: Tensor | None,
    *,
    kept: Tensor | None,
    everywhere: Tensor | None,
    entropy: Tensor | None,
    offset: Tensor | None,
    target_column: Tensor,
    target_weight: Tensor,
    wanted: Tensor,
    block: int = _BLOCK,
) -> None:
    """Write rows ``index`` of the gradient to ``out [T, W]``, which may be the logits themselves.

    With e = exp(x - maximum)::

        e (kept [x in support] + everywhere + entropy (x - maximum + offset)) + target_weight [column = target_column]

    Args:
        last_tie: int64 ``[A]``, largest kept column among those equal to the threshold; None keeps them all.
        kept, everywhere, entropy, offset, target_weight: float32 ``[A]``; None leaves a term out.
        target_column: int64 ``[A]``; of no column where the target lies elsewhere.
        wanted: bool ``[A]``; false writes zeros without reading the row.
    """
    columns = logits.shape[1]
    _gradient_kernel[(index.numel(), triton.cdiv(columns, block))](
        logits,
        out,
        index,
        maximum if temperature is None else temperature,
        maximum,
        threshold,
        target_column if last_tie is None else last_tie,
        maximum if kept is None else kept,
        maximum if everywhere is None else everywhere,
        maximum if entropy is None else entropy,
        maximum if offset is None else offset,
        target_column,
        target_weight,
        wanted.to(torch.int8),
        columns,
        logits.stride(0),
        out.stride(0),
        SCALED=temperature is not None,
        KEPT=kept is not None,
        TIES=last_tie is not None,
        ALL=everywhere is not None,
        ENTROPY=entropy is not None,
        BLOCK=block,
    )
