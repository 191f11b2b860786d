"""One evaluation of rows, shared by the functions that are given logits and the one that makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_support.support.arguments import resolve_filters
from megatron_support.support.backward import Upstream
from megatron_support.support.engine import Support, find_support, replay_support
from megatron_support.support.replay import take_sets
from megatron_support.support.rows import Rows
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.types import RolloutSupport, SamplingParams, TokenLogprobs

Outputs = tuple[Tensor | None, Tensor, Tensor | None]
"""filtered (None where it is the unfiltered one), unfiltered, entropy (None unless asked for)."""


@dataclass(frozen=True)
class Request:
    """What is asked for, besides tensors of the graph. Per-token settings are in the flat order of the targets."""

    shard: VocabularyShard
    sampling: SamplingParams
    replayed: RolloutSupport | None
    entropy: bool
    index_ties: bool
    chunk_size: int | None

    @property
    def filters(self) -> bool:
        """Whether a filtered log-probability can differ from the unfiltered one."""
        return self.replayed is not None or self.sampling.filters

    def take(self, tokens: Tensor) -> Request:
        """The same for some tokens ``[n]`` of the flat order."""

        def pick(value):
            return value.reshape(-1)[tokens.to(value.device)] if isinstance(value, Tensor) else value

        sampling = self.sampling
        return replace(
            self,
            sampling=SamplingParams(pick(sampling.temperature), pick(sampling.top_k), pick(sampling.top_p)),
            replayed=None if self.replayed is None else take_sets(self.replayed, tokens),
        )


def evaluate(rows: Rows, targets: Tensor, request: Request, *, differentiable: bool) -> Support:
    """Every row's support; collective over the shard's group.

    Args:
        targets: int64 ``[A]``, global ids of the rows worked on.
        differentiable: whether a gradient will be asked for.
    """
    if request.replayed is not None:
        return replay_support(rows, targets, request.shard, request.replayed, entropy=request.entropy)
    filters = resolve_filters(request.sampling, rows.index, request.shard, index_ties=request.index_ties)
    return find_support(rows, targets, request.shard, filters, entropy=request.entropy, listed=differentiable)


def empty_outputs(targets: Tensor, request: Request, dtype: torch.dtype) -> Outputs:
    """Zeros of the targets' shape, float32 for float32 computation."""

    def zeros() -> Tensor:
        return torch.zeros(targets.shape, dtype=dtype, device=targets.device)

    return (zeros() if request.filters else None), zeros(), (zeros() if request.entropy else None)


def row_outputs(support: Support, request: Request) -> Outputs:
    """The outputs of the rows worked on, ``[A]`` in the compute dtype."""
    dtype = support.maximum.dtype
    # the differences of logits first: adding the maximum to a logarithm would round it
    shifted = support.target_logit.double() - support.maximum.double()
    unfiltered = (shifted - support.normalizer.log()).to(dtype)
    filtered = None
    if request.filters:
        kept = (shifted - support.log_kept).masked_fill(~support.target_kept, -torch.inf)
        # a row that holds a NaN, or a target that is no token, is at fault and not outside its support
        fault = torch.isnan(support.normalizer) | torch.isnan(shifted)
        filtered = kept.masked_fill(fault, torch.nan).to(dtype)
    return filtered, unfiltered, None if support.entropy is None else support.entropy.to(dtype)


def row_upstream(support: Support, temperature: Tensor | None, grads: list[Tensor | None]) -> Upstream:
    """Gradients of the outputs, ``[A]`` each, as the backward pass takes them.

    Args:
        temperature: as of :class:`Rows`.
    """

    def scaled(grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        grad = grad.to(support.maximum.dtype)
        return grad if temperature is None else grad / temperature.squeeze(1)

    filtered, unfiltered, entropy = (scaled(grad) for grad in grads)
    if filtered is not None:
        filtered = torch.where(support.target_kept, filtered, 0.0)
    return Upstream(filtered, unfiltered, entropy)


def as_token_logprobs(outputs: Outputs, shape: torch.Size) -> TokenLogprobs:
    """The outputs of flat tokens in the targets' shape."""
    filtered, unfiltered, entropy = outputs
    if filtered is None:
        filtered = unfiltered
    return TokenLogprobs(
        filtered=filtered.view(shape),
        unfiltered=unfiltered.view(shape),
        entropy=None if entropy is None else entropy.view(shape),
        in_support=(filtered.detach() != -torch.inf).view(shape),
    )


class DifferentiableOnce(torch.autograd.Function):
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
