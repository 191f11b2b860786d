"""The public functions: arguments checked, autograd attached."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.support.arguments import (
    Ties,
    build_rows,
    check_arguments,
    check_inplace,
    check_targets,
    resolve_filters,
)
from megatron_support.support.backward import Upstream, write_gradient
from megatron_support.support.engine import Support, find_support, replay_support
from megatron_support.support.replay import check_support
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.types import RolloutSupport, SamplingParams, TokenLogprobs


def support_logprobs(
    vocab_parallel_logits: Tensor,
    targets: Tensor,
    sampling: SamplingParams,
    *,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    support: RolloutSupport | None = None,
    entropy: bool = False,
    ties: Ties = "group",
    chunk_size: int | None = None,
    inplace_backward: bool = False,
) -> TokenLogprobs:
    """Log-probabilities of the targets under the sampler's filter and without it, from vocabulary-parallel logits.

    With ``x = logits / temperature`` and S the support that top-k, then top-p on the renormalised top-k leave::

        unfiltered = x[target] - log sum_V exp(x)        filtered = x[target] - log sum_S exp(x)   (-inf outside S)

    The vocabulary is neither sorted nor gathered. Nothing of the logits' size is saved but the logits themselves. All
    floating outputs are differentiable with respect to the logits, once; a row whose upstream gradients are zero gets a
    zero gradient whatever it holds.

    Args:
        vocab_parallel_logits: ``[..., V/TP]`` bf16, fp16, fp32 or fp64; this rank's columns, padding included.
        targets: int64 ``[...]``, global ids; < 0 means no target, and all outputs are 0 there.
        sampling: numbers, or tensors of the targets' shape (or flat).
        vocab_size: tokens in the vocabulary; columns of that id or above are padding and hold no mass. Required when
            ``tp_group`` has more than one rank.
        tp_group: the ranks that share the vocabulary, in order.
        support: the sampler's own kept sets, one per target in their flat order, used instead of top-k and top-p.
        entropy: whether to compute the entropy (of the unfiltered distribution).
        ties: "group" keeps every logit equal to the smallest kept one; "index" cuts that group, lowest id first.
        chunk_size: rows worked on at a time; None chooses what fits the cache. Changes no result.
        inplace_backward: write the gradient over the logits in the backward pass, which saves a tensor of their size.
            Only when nothing else reads the logits after.

    Returns:
        :class:`TokenLogprobs` of the targets' shape, the same on every rank of ``tp_group``.

    Raises:
        ValueError: shapes, dtypes or sizes that do not belong together, or complete logits where a shard is expected.
        RolloutError: a replayed set does not fit its token.
    """
    check_arguments(vocab_parallel_logits, targets, sampling, ties, chunk_size)
    logits = vocab_parallel_logits.reshape(-1, vocab_parallel_logits.shape[-1])
    shard = VocabularyShard.of(logits.shape[1], vocab_size, tp_group)
    flat = targets.reshape(-1)
    wanted = flat >= 0
    check_targets(flat, shard)
    if support is not None:
        check_support(support, targets, shard.size)
    if inplace_backward:
        check_inplace(vocab_parallel_logits)
    request = _Request(
        shard=shard,
        sampling=sampling,
        entropy=entropy,
        replayed=support,
        index_ties=ties == "index",
        chunk_size=chunk_size,
        inplace=inplace_backward,
        differentiable=torch.is_grad_enabled() and logits.requires_grad,
    )
    filtered, unfiltered, entropies = _SupportLogprobs.apply(logits, flat, wanted, request)
    if filtered is None:
        filtered = unfiltered
    return TokenLogprobs(
        filtered=filtered.view(targets.shape),
        unfiltered=unfiltered.view(targets.shape),
        entropy=None if entropies is None else entropies.view(targets.shape),
        in_support=(filtered.detach() != -torch.inf).view(targets.shape),
    )


@dataclass(frozen=True)
class _Request:
    """What is asked for, besides tensors of the graph."""

    shard: VocabularyShard
    sampling: SamplingParams
    replayed: RolloutSupport | None
    entropy: bool
    index_ties: bool
    chunk_size: int | None
    inplace: bool
    differentiable: bool


class _SupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, wanted: Tensor, request: _Request):
        rows = build_rows(logits, wanted, request.sampling, request.shard, request.chunk_size)
        shard, replayed = request.shard, request.replayed
        filters = None
        if replayed is None:
            filters = resolve_filters(request.sampling, rows.index, shard, index_ties=request.index_ties)
        targets = targets[rows.index]
        out_dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        outputs = _empty_outputs(wanted, filters is not None or replayed is not None, request.entropy, out_dtype)
        if rows.index.numel():
            if replayed is not None:
                support = replay_support(rows, targets, shard, replayed, entropy=request.entropy)
            else:
                support = find_support(
                    rows, targets, shard, filters, entropy=request.entropy, listed=request.differentiable
                )
            _write_outputs(outputs, rows.index, support, out_dtype)
            if request.differentiable:
                ctx.support = support
        ctx.set_materialize_grads(False)
        if request.differentiable:
            ctx.save_for_backward(logits, targets, rows.index)
            ctx.request, ctx.temperature = request, rows.temperature
        return outputs

    @staticmethod
    def backward(ctx, grad_filtered: Tensor | None, grad_unfiltered: Tensor | None, grad_entropy: Tensor | None):
        logits, targets, index = ctx.saved_tensors
        with torch.no_grad():
            gradient = _gradient(ctx, logits, targets, index, (grad_filtered, grad_unfiltered, grad_entropy))
        if torch.is_grad_enabled():
            gradient = _DifferentiableOnce.apply(gradient, logits, grad_filtered, grad_unfiltered, grad_entropy)
        return gradient, None, None, None


def _gradient(ctx, logits: Tensor, targets: Tensor, index: Tensor, upstream: tuple[Tensor | None, ...]) -> Tensor:
    request: _Request = ctx.request
    gradient = logits.detach() if request.inplace else torch.empty_like(logits)
    if index.numel() == 0 or all(g is None for g in upstream):
        return gradient.zero_()
    support: Support = ctx.support
    wanted = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    wanted[index] = True
    rows = build_rows(logits, wanted, request.sampling, request.shard, request.chunk_size)

    def of_rows(grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        grad = grad[index].to(rows.dtype)
        return grad if rows.temperature is None else grad / rows.temperature.squeeze(1)

    filtered, unfiltered, entropy = (of_rows(grad) for grad in upstream)
    if filtered is not None:
        filtered = torch.where(support.target_kept, filtered, 0.0)
    width = request.shard.width
    write_gradient(rows, support, targets, Upstream(filtered, unfiltered, entropy), request.shard, gradient[:, :width])
    gradient[:, width:].zero_()
    return gradient


class _DifferentiableOnce(torch.autograd.Function):
    """The gradient as it is; asking for its own gradient is an error, where autograd alone would silently give none."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *inputs: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise RuntimeError(
            "support_logprobs is differentiable once: its backward pass recomputes from saved scalars and has no "
            "derivative of its own; use torch.log_softmax for second derivatives"
        )


def _empty_outputs(
    wanted: Tensor, filtered: bool, entropy: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    def zeros() -> Tensor:
        return torch.zeros(wanted.shape, dtype=dtype, device=wanted.device)

    return (zeros() if filtered else None), zeros(), (zeros() if entropy else None)


def _write_outputs(
    outputs: tuple[Tensor | None, Tensor, Tensor | None], index: Tensor, support: Support, dtype: torch.dtype
) -> None:
    filtered, unfiltered, entropy = outputs
    # the differences of logits first: adding the maximum to a logarithm would round it
    shifted = support.target_logit.double() - support.maximum.double()
    unfiltered[index] = (shifted - support.normalizer.log()).to(dtype)
    if filtered is not None:
        kept = (shifted - support.log_kept).masked_fill(~support.target_kept, -torch.inf)
        # a row that holds a NaN is at fault, not outside its support
        filtered[index] = torch.where(torch.isnan(support.normalizer), support.normalizer, kept).to(dtype)
    if entropy is not None and support.entropy is not None:
        entropy[index] = support.entropy.to(dtype)
