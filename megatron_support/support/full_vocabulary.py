"""Log-probabilities for trainers without Megatron: whole logits and token-aligned masks in, token-aligned values out.

A model of Hugging Face ``transformers`` gives logits ``[B, S, V]`` whose position t predicts token t + 1. Here entry t
of every input mask and of every result is about token t itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.support.api import support_logprobs
from megatron_support.support.arguments import Ties
from megatron_support.types import SamplingParams, TokenLogprobs


def token_logprobs(
    logits: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    sampling: SamplingParams,
    *,
    vocab_size: int | None = None,
    entropy: bool = False,
    ties: Ties = "group",
    inplace_backward: bool = False,
) -> TokenLogprobs:
    """``support_logprobs`` of the response tokens, shifted to the tokens: entry t is about token t.

    Logits of prompt and padding are not read: they may hold -inf or NaN, and get a zero gradient.

    Args:
        logits: ``[B, S, V]`` bf16, fp16 or fp32; a DTensor may shard the vocabulary over a one-dimensional mesh.
        input_ids: int64 ``[B, S]``.
        attention_mask: ``[B, S]``, nonzero at tokens, zero at padding on either side.
        response_mask: ``[B, S]``, nonzero at response tokens.
        sampling: numbers, or tensors ``[B, S]``, entry t being the setting that token t was sampled with.
        vocab_size, entropy, ties, inplace_backward: as for ``support_logprobs``.

    Returns:
        :class:`TokenLogprobs` ``[B, S]``: -inf only at response tokens outside the support; 0 at prompt and padding.

    Raises:
        ValueError: shapes do not belong together, or a response token has no token before it.
    """
    for name, tensor in (("attention_mask", attention_mask), ("response_mask", response_mask)):
        if tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} must have the shape of input_ids, {tuple(input_ids.shape)}, got {tuple(tensor.shape)}; "
                "give one entry per token, prompt and padding included"
            )
    if input_ids.dim() != 2 or logits.shape[:-1] != input_ids.shape:
        raise ValueError(
            f"logits must be [B, S, V] for input_ids [B, S], got {tuple(logits.shape)} and {tuple(input_ids.shape)}; "
            "pass the model's output for all tokens"
        )
    local, group, size = _local_logits(logits)
    found = support_logprobs(
        local,
        _targets(input_ids, attention_mask != 0, response_mask != 0),
        _to_predictors(sampling),
        vocab_size=size if vocab_size is None else vocab_size,
        tp_group=group,
        entropy=entropy,
        ties=ties,
        inplace_backward=inplace_backward,
    )
    return replace(
        found,
        filtered=_to_tokens(found.filtered, 0.0),
        unfiltered=_to_tokens(found.unfiltered, 0.0),
        entropy=None if found.entropy is None else _to_tokens(found.entropy, 0.0),
        in_support=_to_tokens(found.in_support, True),
    )


@torch.no_grad()
def previous_logprobs(
    logits: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    sampling: SamplingParams,
    *,
    vocab_size: int | None = None,
    ties: Ties = "group",
) -> Tensor:
    """``prev_logprobs [B, S]`` fp32 of the sampled tokens under the sampler's filter, without a gradient.

    -inf at response tokens outside the support, 0 at prompt and padding. Arguments as for :func:`token_logprobs`.
    """
    found = token_logprobs(logits, input_ids, attention_mask, response_mask, sampling, vocab_size=vocab_size, ties=ties)
    return found.filtered


def _local_logits(logits: Tensor) -> tuple[Tensor, dist.ProcessGroup | None, int | None]:
    """This rank's logits, the group that shares the vocabulary, and the vocabulary's size where it is shared."""
    if not hasattr(logits, "device_mesh"):
        return logits, None, None
    from torch.distributed.tensor import DTensor, Replicate, Shard  # most of a second, and only DTensors need it

    assert isinstance(logits, DTensor)
    if logits.device_mesh.ndim != 1 or logits.placements[0] not in (Replicate(), Shard(logits.dim() - 1)):
        raise ValueError(
            f"logits placed as {logits.placements} on a {logits.device_mesh.ndim}-dimensional mesh are not supported; "
            "shard the last dimension over a one-dimensional mesh, or pass logits.to_local() of a batch shard"
        )
    local = logits.to_local()
    if logits.placements[0] == Replicate():
        return local, None, None
    size, mesh = logits.shape[-1], logits.device_mesh
    columns = -(-size // mesh.size())
    if local.shape[-1] < columns:
        local = torch.nn.functional.pad(local, (0, columns - local.shape[-1]))
    return local, mesh.get_group(), size


def _targets(input_ids: Tensor, attended: Tensor, response: Tensor) -> Tensor:
    """int64 ``[B, S]``: at each position the response token that it predicts, or -1."""
    response = response & attended
    orphans = response.clone()
    orphans[:, 1:] &= ~attended[:, :-1]
    place = orphans.nonzero()
    if place.numel():
        sample, token = place[0].tolist()
        raise ValueError(
            f"response token {token} of sample {sample} has no token before it, so nothing predicts it; "
            "start every sample with a prompt token (a BOS token will do)"
        )
    targets = torch.full_like(input_ids, -1)
    targets[:, :-1] = torch.where(response[:, 1:], input_ids[:, 1:], -1)
    return targets


def _to_predictors(sampling: SamplingParams) -> SamplingParams:
    """Per-token settings moved to the positions that predict the tokens."""

    def move(value):
        # the last position predicts nothing; its setting is not read
        return torch.cat([value[:, 1:], value[:, -1:]], 1) if isinstance(value, Tensor) else value

    return SamplingParams(move(sampling.temperature), move(sampling.top_k), move(sampling.top_p))


def _to_tokens(values: Tensor, first: float | bool) -> Tensor:
    """Values ``[B, S]`` of predicting positions moved to the predicted tokens; ``first`` at the first token."""
    start = torch.full_like(values[:, :1], first)
    return torch.cat([start, values[:, :-1]], 1)
