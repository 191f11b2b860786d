"""The language model's head and its log-probabilities in one, a few tokens at a time: all logits never exist at once.

Forward multiplies a chunk of hidden states with the head's weight, evaluates the chunk and drops its logits. Backward
makes the same logits again by the same product, so that no token moves across its support's boundary, writes their
gradient over them and multiplies it into the gradients of the hidden states, the weight and the bias. Where only the
filtered log-probability has a gradient, that is zero outside the support: the logits are not made again, and only the
weight's rows of kept tokens take part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.support.arguments import Ties, build_rows, check_arguments, check_targets, row_temperature
from megatron_support.support.backward import SparseGradient, is_sparse, sparse_gradient, write_gradient
from megatron_support.support.evaluation import (
    DifferentiableOnce,
    Request,
    as_token_logprobs,
    empty_outputs,
    evaluate,
    row_outputs,
    row_upstream,
)
from megatron_support.support.replay import check_support
from megatron_support.support.rows import Rows
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.types import RolloutSupport, SamplingParams, TokenLogprobs

_CHUNK_ELEMENTS = 10 << 20
_DEVICE_CHUNK_ELEMENTS = 1 << 27
"""Logits of one chunk of tokens, on a CPU and on an accelerator."""

_WEIGHT_BLOCK = 4096
"""Rows of the weight that are gathered, or of its gradient that are converted, at a time."""


def fused_support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    sampling: SamplingParams,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    accumulate_main_grad: bool = False,
    support: RolloutSupport | None = None,
    entropy: bool = False,
    ties: Ties = "group",
    chunk_size: int | None = None,
) -> TokenLogprobs:
    """``support_logprobs(hidden @ weight.T + bias, targets, ...)`` that never holds ``[T, V/TP]`` logits.

    Only tokens with a target go through the head. Differentiable once with respect to hidden, weight and bias; the
    gradient of the hidden states is summed over ``tp_group``, as a column-parallel linear layer does.

    Args:
        hidden: ``[..., H]``; under sequence parallelism this rank's slice of the first dimension.
        weight: ``[V/TP, H]``, the head's rows of this rank, padding included; a tied embedding's weight is right too.
        targets: int64 ``[...]`` of the whole sequence; < 0 means no target.
        sampling, vocab_size, tp_group, support, entropy, ties: as for ``support_logprobs``.
        bias: ``[V/TP]``.
        sequence_parallel: gather the hidden states over ``tp_group`` along the first dimension, and scatter their
            gradient.
        accumulate_main_grad: add the weight's gradient to ``weight.main_grad``, as Megatron does with
            ``gradient_accumulation_fusion``, instead of returning it.
        chunk_size: tokens per chunk; None bounds the chunk's logits.

    Returns:
        :class:`TokenLogprobs` of the targets' shape, the same on every rank of ``tp_group``.

    Raises:
        ValueError, RolloutError: as ``support_logprobs``; also when the weight has no ``main_grad`` to add to.
    """
    gathered = 1 if tp_group is None or not sequence_parallel else dist.get_world_size(tp_group)
    shape = (hidden.shape[0] * gathered, *hidden.shape[1:-1])
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must be [V/TP, H] for hidden [..., H], got {tuple(weight.shape)} and {tuple(hidden.shape)}; "
            "pass the output layer's weight as it is"
        )
    check_arguments(weight.new_empty(0).expand(*shape, 0), targets, sampling, ties, chunk_size)
    main_grad = getattr(weight, "main_grad", None) if accumulate_main_grad else None
    if accumulate_main_grad and main_grad is None:
        raise ValueError(
            "accumulate_main_grad needs weight.main_grad, which Megatron's DistributedDataParallel makes, got None; "
            "pass accumulate_main_grad=False, or wrap the model first"
        )
    shard = VocabularyShard.of(weight.shape[0], vocab_size, tp_group)
    flat = targets.reshape(-1)
    check_targets(flat, shard)
    if support is not None:
        check_support(support, targets, shard.size)
    head = _Head(
        request=Request(shard, sampling, support, entropy, ties == "index", None),
        chunk=chunk_size or _chunk_tokens(shard.width, hidden.device),
        gather=gathered > 1,
        main_grad=main_grad,
        differentiable=torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (hidden, weight, bias)),
    )
    return as_token_logprobs(_FusedHead.apply(hidden, weight, bias, flat, head), targets.shape)


@dataclass(frozen=True)
class _Head:
    """What is asked for, besides tensors of the graph."""

    request: Request
    chunk: int
    gather: bool
    main_grad: Tensor | None
    differentiable: bool


def _chunk_tokens(width: int, device: torch.device) -> int:
    elements = _CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    return max(1, elements // max(width, 1))


def _parts(targets: Tensor, head: _Head) -> tuple[Tensor, ...]:
    """The tokens with a target, in chunks."""
    tokens = (targets >= 0).nonzero().flatten()
    return tokens.split(head.chunk) if tokens.numel() else ()


def _buffer(hidden: Tensor, parts: tuple[Tensor, ...], head: _Head) -> Tensor:
    """Room for the logits of any chunk."""
    return hidden.new_empty(max((part.numel() for part in parts), default=0) * head.request.shard.width)


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, buffer: Tensor) -> Tensor:
    """``[c, W]`` in the buffer, W the columns of this rank that are tokens. Equal calls give equal logits."""
    width = head.request.shard.width
    logits = buffer[: states.shape[0] * width].view(-1, width) if width else buffer.view(states.shape[0], 0)
    torch.mm(states, weight[:width].t(), out=logits)
    if bias is not None:
        logits += bias[:width]
    return logits


def _rows(logits: Tensor, request: Request) -> Rows:
    wanted = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    return build_rows(logits, wanted, request.sampling, request.shard)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head):
        request = head.request
        states = _gathered(hidden, head)
        outputs = empty_outputs(targets, request, torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        supports = []
        parts = _parts(targets, head)
        buffer = _buffer(states, parts, head)
        for part in parts:
            logits = _logits(states[part], weight, bias, head, buffer)
            taken = request.take(part)
            support = evaluate(_rows(logits, taken), targets[part], taken, differentiable=head.differentiable)
            for whole, values in zip(outputs, row_outputs(support, request), strict=True):
                if whole is not None and values is not None:
                    whole[part] = values
            if head.differentiable:
                supports.append(support)
        ctx.set_materialize_grads(False)
        if head.differentiable:
            # the parameter itself is kept too: Megatron's marks for the optimizer are attributes of it
            ctx.save_for_backward(hidden, weight, bias, targets)
            ctx.head, ctx.supports, ctx.parameter = head, supports, weight
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        hidden, weight, bias, targets = ctx.saved_tensors
        with torch.no_grad():
            results = list(_gradients(ctx, hidden, weight, bias, targets, grads))
        if torch.is_grad_enabled():
            results = [r if r is None else DifferentiableOnce.apply(r, hidden, weight, *grads) for r in results]
        return *results, None, None


def _gradients(
    ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias."""
    head: _Head = ctx.head
    states = _gathered(hidden, head)
    sums = _Sums(
        hidden=torch.zeros_like(states) if ctx.needs_input_grad[0] else None,
        weight=_weight_sum(weight, head) if ctx.needs_input_grad[1] else None,
        bias=torch.zeros_like(bias, dtype=_wide(bias)) if bias is not None and ctx.needs_input_grad[2] else None,
    )
    parts = _parts(targets, head) if any(grad is not None for grad in grads) else ()
    buffer = None
    for part, support in zip(parts, ctx.supports, strict=False):
        taken = head.request.take(part)
        every = torch.arange(part.numel(), device=part.device)
        temperature = row_temperature(taken.sampling, every, support.maximum.dtype)
        upstream = row_upstream(support, temperature, [None if g is None else g[part] for g in grads])
        listed = is_sparse(support, upstream)
        wanted = upstream.nonzero()
        if listed is not None and bool((listed | ~wanted).all()):
            found = sparse_gradient(support, wanted.nonzero().flatten(), targets[part], upstream, head.request.shard)
            _add_sparse(sums, found, part, states, weight)
            continue
        buffer = _buffer(states, parts, head) if buffer is None else buffer
        logits = _logits(states[part], weight, bias, head, buffer)
        write_gradient(_rows(logits, taken), support, targets[part], upstream, head.request.shard, logits)
        _add_dense(sums, logits, part, states, weight)
    return (
        None if sums.hidden is None else _scattered(sums.hidden, hidden.shape, head),
        None if sums.weight is None else _finished(ctx.parameter, sums.weight, head),
        None if sums.bias is None or bias is None else sums.bias.to(bias.dtype),
    )


@dataclass(frozen=True)
class _Sums:
    """Gradients, summed up in place chunk by chunk; None where none is asked for."""

    hidden: Tensor | None
    """``[T, H]``"""

    weight: Tensor | None
    """``[V/TP, H]``"""

    bias: Tensor | None
    """``[V/TP]``"""


def _add_dense(sums: _Sums, gradient: Tensor, part: Tensor, states: Tensor, weight: Tensor) -> None:
    """Add the products of a chunk's logits' gradient ``[c, W]``."""
    width = gradient.shape[1]
    if sums.hidden is not None:
        sums.hidden[part] = torch.mm(gradient, weight[:width])
    if sums.weight is not None:
        _add_product(sums.weight[:width], gradient, states[part])
    if sums.bias is not None:
        sums.bias[:width] += gradient.sum(0, dtype=sums.bias.dtype)


def _add_sparse(sums: _Sums, found: SparseGradient, part: Tensor, states: Tensor, weight: Tensor) -> None:
    """The same where few columns have a gradient: dense products over those columns, a block at a time."""
    columns, place = found.column.unique(return_inverse=True)
    hidden = states[part]
    of_hidden = torch.zeros(hidden.shape, dtype=_wide(hidden), device=hidden.device)
    for start in range(0, columns.numel(), _WEIGHT_BLOCK):
        block = columns[start : start + _WEIGHT_BLOCK]
        inside = (place >= start) & (place < start + block.numel())
        gradient = hidden.new_zeros(part.numel(), block.numel())
        gradient.index_put_((found.entry[inside], place[inside] - start), found.value[inside].to(hidden.dtype))
        of_hidden += torch.mm(gradient, weight[block])
        if sums.weight is not None:
            sums.weight.index_add_(0, block, torch.mm(gradient.t(), hidden).to(sums.weight.dtype))
        if sums.bias is not None:
            sums.bias.index_add_(0, block, gradient.sum(0, dtype=sums.bias.dtype))
    if sums.hidden is not None:
        sums.hidden[part] = of_hidden.to(sums.hidden.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    """A dtype of at least float32 to sum in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _gathered(hidden: Tensor, head: _Head) -> Tensor:
    """``[T, H]``, of all ranks under sequence parallelism."""
    if not head.gather:
        return hidden.reshape(-1, hidden.shape[-1])
    return head.request.shard.gather(hidden).reshape(-1, hidden.shape[-1])


def _scattered(gradient: Tensor, shape: torch.Size, head: _Head) -> Tensor:
    """The gradient of this rank's hidden states, summed over the ranks."""
    shard = head.request.shard
    total = shard.total(gradient)
    if head.gather:
        total = total.view(shard.ranks, -1, shape[-1])[shard.rank]
    return total.reshape(shape)


def _weight_sum(weight: Tensor, head: _Head) -> Tensor:
    """Where the weight's gradient is summed: its ``main_grad``, or zeros in at least float32 if chunks are added up."""
    if head.main_grad is not None:
        return head.main_grad
    return torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device)


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """``total [W, H] += gradient.T @ hidden``."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
        return
    for start in range(0, total.shape[0], _WEIGHT_BLOCK):
        block = slice(start, start + _WEIGHT_BLOCK)
        total[block] += torch.mm(gradient[:, block].t(), hidden)


def _finished(parameter: Tensor, total: Tensor, head: _Head) -> Tensor | None:
    """What autograd gets for the weight; with ``main_grad``, what Megatron's own linear layer returns."""
    if head.main_grad is None:
        return total.to(parameter.dtype)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    # a stand-in keeps the parameter's hooks on the thread of the backward pass, as overlapped reductions need
    parameter.grad_added_to_main_grad = True
    make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
    return make(parameter.shape, dtype=parameter.dtype, device=parameter.device)
