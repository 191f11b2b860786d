"""The gradient of the logits, in one read and one write; or in a write alone, where the kept logits are listed.

The scaled logit is recomputed exactly as plain torch does, so that comparisons with the threshold agree to the last
bit. No atomics: equal inputs give equal results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_support.support.kernels import launch
from megatron_support.support.kernels.common import DEPTH, LOG2_E, load_scaled

BLOCK = 2048
"""Columns per program."""


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
        x = load_scaled(logits, row * row_stride + column, inside, temperature, entry, SCALED)
        distance = x - tl.load(maximum + entry)
        factor = tl.zeros((BLOCK,), dtype=tl.float32)
        if ALL:
            factor += tl.load(all_weight + entry)
        if ENTROPY:
            bounded = tl.where(distance < DEPTH, DEPTH, distance)
            factor += (bounded + tl.load(entropy_offset + entry)) * tl.load(entropy_weight + entry)
        if KEPT:
            bar = tl.load(threshold + entry)
            kept = x >= bar
            if TIES:
                kept = kept & ((x > bar) | (column <= tl.load(last_tie + entry)))
            factor += tl.where(kept, tl.load(kept_weight + entry), 0.0)
        gradient = tl.exp2(distance * LOG2_E) * factor
        gradient += tl.where(column == tl.load(target_column + entry), tl.load(target_weight + entry), 0.0)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scatter_kernel(
    out,
    index,
    maximum,
    threshold,
    last_tie,
    kept_weight,
    target_column,
    target_weight,
    wanted,
    values,
    places,
    out_stride,
    value_stride,
    place_stride,
    count,
    TIES: tl.constexpr,
    ROOM: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + entry) != 0:
        slot = tl.arange(0, ROOM)
        x = tl.load(values + entry * value_stride + slot, mask=slot < count, other=-float("inf"))
        column = tl.load(places + entry * place_stride + slot, mask=slot < count, other=0)
        bar = tl.load(threshold + entry)
        kept = (slot < count) & (x > -float("inf")) & (x >= bar)
        if TIES:
            kept = kept & ((x > bar) | (column <= tl.load(last_tie + entry)))
        gradient = tl.exp2((x - tl.load(maximum + entry)) * LOG2_E) * tl.load(kept_weight + entry)
        gradient += tl.where(column == tl.load(target_column + entry), tl.load(target_weight + entry), 0.0)
        row = tl.load(index + entry)
        tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=kept)


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
    block: int | None = None,
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
    columns, device = logits.shape[1], logits.device
    block = block or BLOCK
    launch(
        _gradient_kernel,
        (index.numel(), triton.cdiv(columns, block)),
        device,
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


def listed_gradient(
    out: Tensor,
    index: Tensor,
    maximum: Tensor,
    threshold: Tensor,
    last_tie: Tensor | None,
    *,
    kept: Tensor,
    target_column: Tensor,
    target_weight: Tensor,
    wanted: Tensor,
    values: Tensor,
    places: Tensor,
) -> None:
    """Write the kept logits' gradients to rows ``index`` of ``out [T, W]``, where ``wanted [A]`` is true.

    Args:
        values: float32 ``[A, K]``, scaled logits, among them all that the row keeps.
        places: int64 ``[A, K]``, their columns; none occurs twice among finite logits of a row.
        last_tie, kept, target_column, target_weight: as for :func:`row_gradient`.
    """
    launch(
        _scatter_kernel,
        (index.numel(),),
        out.device,
        out,
        index,
        maximum,
        threshold,
        target_column if last_tie is None else last_tie,
        kept,
        target_column,
        target_weight,
        wanted.to(torch.int8),
        values,
        places,
        out.stride(0),
        values.stride(0),
        places.stride(0),
        values.shape[1],
        TIES=last_tie is not None,
        ROOM=triton.next_power_of_2(values.shape[1]),
    )
