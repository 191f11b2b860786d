"""The public functions: arguments checked, autograd attached."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.support import kernels
from megatron_support.support.arguments import (
    Ties,
    build_rows,
    check_arguments,
    check_inplace,
    check_targets,
    compute_dtype,
)
from megatron_support.support.backward import write_gradient
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

    On CUDA, bf16, fp16 and fp32 logits go through Triton kernels where Triton is installed; one that does not compile
    is logged once, and plain torch takes over. With them the host waits for nothing, forward or backward, on one rank,
    nor on several without top-p, and both passes can be captured in a CUDA graph once a call like it has compiled the
    kernels. It does wait, and a capture fails: with top-p on several ranks (once, for whether collectives are due for
    boundaries beyond the candidates), likewise with a top-k above 4,128 or one per token on the device; for settings
    per token that are on the CPU; with a replayed support; with float64 logits.

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
    check_targets(flat, shard)
    if support is not None:
        check_support(support, targets, shard.size)
    if inplace_backward:
        check_inplace(vocab_parallel_logits)
    request = Request(shard, sampling, support, entropy, ties == "index", chunk_size)
    differentiable = torch.is_grad_enabled() and logits.requires_grad
    outputs = _SupportLogprobs.apply(logits, flat, request, differentiable, inplace_backward)
    return as_token_logprobs(outputs, targets.shape)


class _SupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, request: Request, differentiable: bool, inplace: bool):
        # the host need not know which rows have a target where kernels skip the others
        every = request.replayed is None and kernels.usable(logits, compute_dtype(logits))
        rows = build_rows(logits, targets >= 0, request.sampling, request.shard, request.chunk_size, whole=every)
        outputs = empty_outputs(targets, request, rows.dtype)
        if rows.index.numel():
            support = evaluate(rows, targets[rows.index], request, differentiable=differentiable)
            for output, part in zip(outputs, row_outputs(support, request), strict=True):
                if output is not None and part is not None:
                    output[rows.index] = torch.where(targets[rows.index] >= 0, part, 0.0)
            if differentiable:
                ctx.support = support
        ctx.set_materialize_grads(False)
        if differentiable:
            ctx.save_for_backward(logits, targets, rows.index)
            ctx.request, ctx.inplace = request, inplace
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        logits, targets, index = ctx.saved_tensors
        with torch.no_grad():
            gradient = logits.detach() if ctx.inplace else torch.empty_like(logits)
            if index.numel() == 0 or all(grad is None for grad in grads):
                gradient.zero_()
            else:
                request: Request = ctx.request
                every = index.numel() == targets.numel()
                rows = build_rows(
                    logits, targets >= 0, request.sampling, request.shard, request.chunk_size, whole=every
                )
                upstream = row_upstream(ctx.support, rows.temperature, [None if g is None else g[index] for g in grads])
                width = request.shard.width
                write_gradient(rows, ctx.support, targets[index], upstream, request.shard, gradient[:, :width])
                gradient[:, width:].zero_()
        if torch.is_grad_enabled():
            gradient = DifferentiableOnce.apply(gradient, logits, *grads)
        return gradient, None, None, None, None
