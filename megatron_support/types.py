"""Frozen data types shared by every layer. Shapes are written as ``[T]``: T tokens of one microbatch on this rank.

A per-token tensor has the length of the tokens; entry t is about token t, predicted from logits t-1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_support.metrics import MetricSet


@dataclass(frozen=True)
class SamplingParams:
    """The filter under which tokens were sampled: temperature, then top-k, then top-p on the renormalised top-k.

    Each field is a number for all tokens, or a tensor with one entry per token (mixed batches).

    Raises:
        ValueError: a number is outside its range. Tensor entries are not read here (that would synchronise a device).
    """

    temperature: float | Tensor = 1.0
    """Divides the logits, > 0."""

    top_k: int | Tensor | None = None
    """Number of largest logits kept, >= 1. ``None``, or a tensor entry of 0, disables the filter."""

    top_p: float | Tensor = 1.0
    """Smallest kept mass, in (0, 1]. 1.0 disables the filter."""

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Tensor) and not (0 < self.temperature < math.inf):
            raise ValueError(
                f"temperature must be a finite number > 0, got {self.temperature!r}; for greedy decoding use top_k=1"
            )
        if isinstance(self.top_k, Tensor) or self.top_k is None:
            pass
        elif isinstance(self.top_k, bool) or self.top_k != int(self.top_k) or self.top_k < 1:
            raise ValueError(f"top_k must be an integer >= 1, got {self.top_k!r}; use None to disable top-k filtering")
        if not isinstance(self.top_p, Tensor) and not (0 < self.top_p <= 1):
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}; use 1.0 to disable nucleus filtering")

    @property
    def filters(self) -> bool:
        """Whether a token can fall outside the support. True for a tensor field, whatever its entries."""
        return self.top_k is not None or isinstance(self.top_p, Tensor) or self.top_p < 1.0


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of the target tokens, all of the targets' shape ``[...]``; 0 where the target is < 0."""

    filtered: Tensor
    """fp32, under temperature, top-k and top-p (or a replayed support). -inf outside the support."""

    unfiltered: Tensor
    """fp32, under the temperature alone. Always finite for finite logits."""

    entropy: Tensor | None
    """fp32, nats, of the unfiltered distribution over the vocabulary. None unless asked for."""

    in_support: Tensor
    """bool, whether the target is in the support. True where the target is < 0."""


@dataclass(frozen=True)
class RolloutSupport:
    """The sampler's own kept sets, one per token, as CSR: token t may be any of ``token_ids[offsets[t]:offsets[t+1]]``.

    An empty set means that token was not sampled under a filter (prompt, padding).
    """

    token_ids: Tensor
    """int64 ``[N]``, global vocabulary ids."""

    offsets: Tensor
    """int64 ``[T + 1]``, ascending, from 0 to N."""


_TOKEN_BATCH_TENSORS = (
    "input_ids",
    "position_ids",
    "targets",
    "response_mask",
    "sequence_ids",
    "token_index",
    "cu_seqlens",
)


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """One microbatch on this rank, ready for the model and for the loss.

    Padded, packed (thd) and context-parallel shards are only different ways to fill it. Flat per-token tensors have
    length ``T = input_ids.numel()`` and are in *predictor order*: entry j is about ``targets[j]``, the token that the
    model predicts at flat position j. The shift by one is made where this is built and nowhere else.
    """

    input_ids: Tensor
    """int64, ``[B, S]`` (padded) or ``[1, T]`` (packed); the context-parallel shard of this rank."""

    position_ids: Tensor
    """int64, as ``input_ids``; position inside its own sequence."""

    targets: Tensor
    """int64 ``[T]``, global ids; -1 where no token is predicted (last token of a sequence, padding)."""

    response_mask: Tensor
    """bool ``[T]``, whether the target is a response token."""

    sequence_ids: Tensor
    """int64 ``[T]``, index of the sequence in the rollout minibatch; 0 at padding, which is masked."""

    token_index: Tensor
    """int64 ``[T]``, index of the target in the rollout batch's flat token storage; -1 where targets is -1."""

    sampling: SamplingParams
    """Numbers, or tensors ``[T]``."""

    num_sequences: int
    """Number of sequences of the whole rollout minibatch: the length of per-sequence tensors."""

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Further ``[T]`` tensors by name: prev_logprobs, generation_logprobs, reference_logprobs, advantages, ..."""

    cu_seqlens: Tensor | None = None
    """Packed only: int32 ``[n + 1]``, boundaries of the padded sequences before the context-parallel split."""

    max_seqlen: int | None = None
    """Packed only: the longest padded sequence, in tokens."""

    support: RolloutSupport | None = None
    """Replayed support of the targets, in the same order."""

    @property
    def packed(self) -> bool:
        """Whether the microbatch is packed (thd)."""
        return self.cu_seqlens is not None

    def to(self, device: torch.device) -> TokenBatch:
        """The same microbatch with every tensor on ``device``. The host waits for no copy to a GPU."""
        if device == self.input_ids.device:
            return self
        pin = device.type == "cuda" and self.input_ids.device.type == "cpu"  # copies from other memory are awaited

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return (value.pin_memory() if pin else value).to(device, non_blocking=True)

        sampling = self.sampling
        support = self.support and RolloutSupport(move(self.support.token_ids), move(self.support.offsets))
        return replace(
            self,
            **{name: move(getattr(self, name)) for name in _TOKEN_BATCH_TENSORS},
            sampling=SamplingParams(move(sampling.temperature), move(sampling.top_k), move(sampling.top_p)),
            columns={name: move(column) for name, column in self.columns.items()},
            support=support,
        )


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """What :func:`megatron_support.actor_loss` returns."""

    loss: Tensor
    """Scalar, attached to the graph of ``curr_logprobs``."""

    metrics: MetricSet
    """Detached; each metric carries its own reduction."""

    valid_tokens: Tensor
    """int64 scalar: response tokens before exclusion, on this rank."""

    valid_sequences: Tensor
    """int64 scalar: sequences with sample_mask and at least one response token, before exclusion.

    Each is counted on one context-parallel rank.
    """

    surviving_tokens: Tensor
    """int64 scalar: response tokens after exclusion, on this rank."""

    surviving_sequences: Tensor
    """int64 scalar: sequences with at least one surviving token; each is counted on one CP rank."""
