"""From whatever a host passes to one set of tensors of one shape. Checks shapes, never values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.errors import ConfigurationError
from megatron_support.loss.layout import Layout, SequenceSum
from megatron_support.loss.masks import intersection


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Raw per-token tensors of one shape and dtype, that of curr_logprobs or fp32; -inf outside the support."""

    layout: Layout
    valid: Tensor
    """bool, response & sample mask: the KL mask."""
    filtered: Tensor | bool
    """Where a -inf means "outside the support"; elsewhere it is a fault."""
    curr_logprobs: Tensor
    advantages: Tensor
    prev_logprobs: Tensor | None
    generation_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    curr_logprobs_unfiltered: Tensor | None
    entropy: Tensor | None
    correction_weights: Tensor | None
    rewards: Tensor | None
    """``[sequences]``."""

    @property
    def previous(self) -> Tensor:
        """Previous log-probabilities; the current ones where none are given (on policy, or nothing reads them)."""
        return self.curr_logprobs.detach() if self.prev_logprobs is None else self.prev_logprobs


def token_inputs(
    *,
    curr_logprobs: Tensor,
    response_mask: Tensor,
    advantages: Tensor | None = None,
    sample_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    filtered: Tensor | bool = True,
    rewards: Tensor | None = None,
    sequence_sum: SequenceSum | None = None,
    **logprobs: Tensor | None,
) -> TokenInputs:
    """Check shapes, flatten tokens that carry sequence ids, and make masks bool.

    Args:
        curr_logprobs: ``[B, S]``, or any shape of T elements with ``sequence_ids``.
        response_mask: the same shape; any dtype, nonzero is True.
        advantages: the same shape.
        sample_mask: ``[sequences]``; None for all.
        sequence_ids: int64, the same shape as ``curr_logprobs``, in [0, sequences).
        filtered: one bool, or a tensor per sequence or per token.
        rewards: ``[sequences]``.
        sequence_sum: see :class:`Layout`.
        logprobs: further per-token tensors of :class:`TokenInputs` by name.

    Raises:
        ConfigurationError: a tensor has the wrong shape.
    """
    layout = _layout(curr_logprobs, sequence_ids, sample_mask, rewards, sequence_sum)

    dtype = torch.float64 if curr_logprobs.dtype == torch.float64 else torch.float32

    def tokens(name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        if value.shape != curr_logprobs.shape:
            raise ConfigurationError(
                f"{name} must have the shape of curr_logprobs {tuple(curr_logprobs.shape)}, got {tuple(value.shape)}; "
                "pass one entry per token"
            )
        value = value.reshape(layout.shape).contiguous()
        return value.to(dtype) if name != "response_mask" else value

    mask = tokens("response_mask", response_mask)
    assert mask is not None
    valid = _as_bool(mask)
    curr = tokens("curr_logprobs", curr_logprobs)
    assert curr is not None
    given = tokens("advantages", advantages)
    if sample_mask is not None:
        kept = layout.to_tokens(_as_bool(_sequences("sample_mask", sample_mask, layout)))
        valid = intersection(valid, kept)
    return TokenInputs(
        layout=layout,
        valid=valid,
        filtered=_filtered(filtered, curr_logprobs, layout),
        curr_logprobs=curr,
        advantages=torch.zeros_like(curr) if given is None else given,
        rewards=None if rewards is None else _sequences("rewards", rewards, layout),
        **{name: tokens(name, logprobs.get(name)) for name in _OPTIONAL},
    )


_OPTIONAL = (
    "prev_logprobs",
    "generation_logprobs",
    "reference_logprobs",
    "curr_logprobs_unfiltered",
    "entropy",
    "correction_weights",
)


def _layout(
    curr_logprobs: Tensor,
    sequence_ids: Tensor | None,
    sample_mask: Tensor | None,
    rewards: Tensor | None,
    sequence_sum: SequenceSum | None,
) -> Layout:
    shape = curr_logprobs.shape
    if sequence_ids is None:
        if curr_logprobs.ndim != 2:
            raise ConfigurationError(
                f"curr_logprobs must be [B, S] without sequence_ids, got shape {tuple(shape)}; "
                "pass sequence_ids with flat tokens"
            )
        return Layout(shape=shape, num_sequences=shape[0], sequence_sum=sequence_sum)
    if sequence_ids.shape != shape:
        raise ConfigurationError(
            f"sequence_ids must have the shape of curr_logprobs {tuple(shape)}, got {tuple(sequence_ids.shape)}; "
            "pass one id per token"
        )
    total = curr_logprobs.numel()
    given = sample_mask if sample_mask is not None else rewards
    # Ids are below the number of sequences; without either tensor the number of tokens is a bound that needs no sync.
    num_sequences = total if given is None else given.numel()
    ids = sequence_ids.reshape(-1)
    return Layout(shape=torch.Size([total]), num_sequences=num_sequences, sequence_ids=ids, sequence_sum=sequence_sum)


def _sequences(name: str, value: Tensor, layout: Layout) -> Tensor:
    if value.shape != (layout.num_sequences,):
        raise ConfigurationError(
            f"{name} must have one entry per sequence, shape ({layout.num_sequences},), got {tuple(value.shape)}; "
            "pass it per sequence"
        )
    return value


def _filtered(filtered: Tensor | bool, curr_logprobs: Tensor, layout: Layout) -> Tensor | bool:
    if not isinstance(filtered, Tensor):
        return bool(filtered)
    if filtered.shape == curr_logprobs.shape:  # per token, also where T tokens are T sequences
        return _as_bool(filtered).reshape(layout.shape)
    if filtered.numel() == 1 and filtered.ndim == 0:
        return _as_bool(filtered)
    return layout.to_tokens(_as_bool(_sequences("filtered", filtered, layout)))


def _as_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != 0
