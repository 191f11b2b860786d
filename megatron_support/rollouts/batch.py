"""RolloutBatch: the sequences of one actor step, ragged, on the host, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_support.errors import RolloutError
from megatron_support.types import RolloutSupport, SamplingParams

PER_TOKEN = (
    "tokens",
    "response_mask",
    "generation_logprobs",
    "prev_logprobs",
    "prev_logprobs_unfiltered",
    "curr_logprobs",
    "curr_logprobs_unfiltered",
    "reference_logprobs",
    "teacher_logprobs",
    "entropy",
    "values",
    "advantages",
)
"""Fields with one entry per token; entry t is about token t."""

PER_SEQUENCE = (
    "rewards",
    "reward_components",
    "sample_mask",
    "group_ids",
    "temperature",
    "top_k",
    "top_p",
    "sample_ids",
    "prompts",
    "responses",
)
"""Fields with one entry per sequence."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """S sequences of N tokens in all, stored end to end: sequence s is ``[cu_seqlens[s]:cu_seqlens[s + 1]]``.

    Every rank holds the same batch. That makes advantages, minibatches and data-parallel assignment pure functions of
    it, so a different layout trains on exactly the same minibatches.
    """

    tokens: Tensor
    """int64 ``[N]``."""
    cu_seqlens: Tensor
    """int64 ``[S + 1]``."""
    response_mask: Tensor
    """bool ``[N]``."""
    rewards: Tensor
    """fp32 ``[S]``."""
    sample_mask: Tensor
    """bool ``[S]``; a False sequence enters no term of the loss."""
    group_ids: Tensor
    """int64 ``[S]``; samples of one prompt share an id."""
    temperature: Tensor
    """fp32 ``[S]``."""
    top_k: Tensor
    """int64 ``[S]``; 0 for none."""
    top_p: Tensor
    """fp32 ``[S]``; 1 for none."""
    sample_ids: tuple[str, ...]
    """Names for messages and reports."""
    support: RolloutSupport | None = None
    """The sampler's kept sets over all N tokens."""
    prompts: tuple[str, ...] | None = None
    responses: tuple[str, ...] | None = None
    generation_logprobs: Tensor | None = None
    """fp32 ``[N]``, the inference engine's, under its filter."""
    prev_logprobs: Tensor | None = None
    """fp32 ``[N]``, the trainer's before the step, under the filter; -inf outside the support."""
    prev_logprobs_unfiltered: Tensor | None = None
    curr_logprobs: Tensor | None = None
    """fp32 ``[N]``, what the loss of the last pass saw, under the filter; kept for reports, no term reads it."""
    curr_logprobs_unfiltered: Tensor | None = None
    reference_logprobs: Tensor | None = None
    """fp32 ``[N]``, unfiltered."""
    teacher_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    """fp32 ``[N]``, of the current policy over the whole vocabulary, in nats."""
    reward_components: Tensor | None = None
    """fp32 ``[S, K]``, what ``rewards`` is made of; read by GDPO."""
    values: Tensor | None = None
    advantages: Tensor | None = None
    """fp32 ``[N]``."""
    unknown_fields: frozenset[str] = frozenset()
    """Fields whose values, or whose -inf, the program that wrote the file had lost: what stands there is no fact."""

    def __post_init__(self) -> None:
        """Check kinds and sizes, and that no response begins a sequence: its first token is predicted from nothing."""
        for f in fields(self):
            _check_host_tensor(f.name, getattr(self, f.name))
        tokens, sequences = int(self.cu_seqlens[-1]), self.cu_seqlens.numel() - 1
        if int(self.cu_seqlens[0]) != 0 or (self.lengths < 1).any():
            raise RolloutError(
                f"cu_seqlens must ascend from 0, every sequence with at least one token, got {self.cu_seqlens.tolist()}"
            )
        for names, size, unit in ((PER_TOKEN, tokens, "token"), (PER_SEQUENCE, sequences, "sequence")):
            for name in names:
                value = getattr(self, name)
                if value is not None and len(value) != size:
                    raise RolloutError(f"{name} must have {size} entries, one for each {unit}, got {len(value)}")
                if isinstance(value, Tensor) and value.ndim != 1 and name in PER_TOKEN:
                    raise RolloutError(
                        f"{name} must have one number for each token, got shape {tuple(value.shape)}; flatten it"
                    )
        if self.support is not None and self.support.offsets.numel() != tokens + 1:
            raise RolloutError(
                f"support.offsets must have {tokens + 1} entries, one more than tokens, got {len(self.support.offsets)}"
            )
        first = self.response_mask[self.cu_seqlens[:-1]]
        if first.any():
            name = self.sample_ids[int(first.nonzero()[0])]
            raise RolloutError(f"the first token of sample {name!r} must not be a response token; add a prompt token")

    @property
    def num_sequences(self) -> int:
        return self.rewards.numel()

    @cached_property
    def lengths(self) -> Tensor:
        """int64 ``[S]``."""
        return self.cu_seqlens.diff()

    @property
    def sequence_ids(self) -> Tensor:
        """int64 ``[N]``: the sequence of each token."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    @property
    def filtering(self) -> Tensor:
        """bool ``[S]``: whether a token of the sequence can fall outside the support."""
        replayed = torch.full((self.num_sequences,), self.support is not None)
        return (self.top_k > 0) | (self.top_p < 1) | replayed

    @cached_property
    def shared_sampling(self) -> SamplingParams | None:
        """What all sequences were sampled under, or None where they differ."""
        columns = (self.temperature, self.top_k, self.top_p)
        if not all(bool((column == column[0]).all()) for column in columns):
            return None
        temperature, top_k, top_p = (column[0].item() for column in columns)
        return SamplingParams(shortest_decimal(temperature), int(top_k) or None, shortest_decimal(top_p))

    def with_columns(self, **columns: Any) -> RolloutBatch:
        """A copy with some columns replaced; a replaced column is no longer unknown."""
        return replace(self, **{"unknown_fields": self.unknown_fields - columns.keys(), **columns})

    def without_filters(self) -> RolloutBatch:
        """A copy whose tokens are all inside the support: the temperature stays, top-k, top-p and replay go."""
        return replace(self, top_k=torch.zeros_like(self.top_k), top_p=torch.ones_like(self.top_p), support=None)

    def truncated(self, limit: int) -> RolloutBatch:
        """A copy with the first ``limit`` tokens of each sequence. Rewards and texts stay those of the whole one."""
        lengths = self.lengths.clamp_max(limit)
        rows = ragged_arange(self.cu_seqlens[:-1], lengths)
        columns = {name: value[rows] for name in PER_TOKEN if (value := getattr(self, name)) is not None}
        support = None if self.support is None else select_support(self.support, rows)
        return replace(
            self, cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), support=support, **columns
        )

    def select(self, indices: Tensor) -> RolloutBatch:
        """The batch of sequences ``indices`` (int64), in that order."""
        lengths = self.lengths[indices]
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        token_rows = ragged_arange(self.cu_seqlens[indices], lengths)
        chosen: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("cu_seqlens", "support") or value is None:
                continue
            if f.name == "unknown_fields":
                chosen[f.name] = value
            elif isinstance(value, tuple):
                chosen[f.name] = tuple(value[i] for i in indices.tolist())
            else:
                chosen[f.name] = value[token_rows if f.name in PER_TOKEN else indices]
        support = None if self.support is None else select_support(self.support, token_rows)
        return RolloutBatch(cu_seqlens=cu_seqlens, support=support, **chosen)


def _check_host_tensor(name: str, value: Any) -> None:
    """Raise where ``value`` is a tensor that numpy cannot read: microbatches are cut by numpy, on the host."""
    if not isinstance(value, Tensor):
        return
    if value.device.type != "cpu" or value.requires_grad or value.dtype == torch.bfloat16:
        grad = ", with gradient" if value.requires_grad else ""
        raise RolloutError(
            f"{name} must be a tensor on the CPU, detached, in fp32, int64 or bool, got {value.dtype} on "
            f"{value.device}{grad}; pass {name}.detach().cpu() in one of them"
        )


def ragged_arange(starts: Tensor, lengths: Tensor) -> Tensor:
    """``cat([arange(s, s + n) for s, n in zip(starts, lengths)])`` without a loop."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    return torch.arange(total) + torch.repeat_interleave(starts - (ends - lengths), lengths)


def shortest_decimal(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 0.9, not 0.8999999761581421."""
    target = torch.tensor(value, dtype=torch.float32)
    candidates = (float(f"{value:.{digits}g}") for digits in range(6, 10))  # nine digits tell all fp32 numbers apart
    return next((c for c in candidates if torch.tensor(c, dtype=torch.float32) == target), value)


def select_support(support: RolloutSupport, token_rows: Tensor) -> RolloutSupport:
    """The kept sets of tokens ``token_rows`` (int64), in that order; an empty set for -1."""
    rows = token_rows.clamp_min(0)
    lengths = torch.where(token_rows >= 0, support.offsets[rows + 1] - support.offsets[rows], 0)
    rows = ragged_arange(support.offsets[rows], lengths)
    return RolloutSupport(support.token_ids[rows], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
