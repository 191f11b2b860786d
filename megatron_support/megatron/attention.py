"""A core attention in plain torch for Megatron's local layers: any device, packing, context parallelism.

Layout is the one Megatron and Transformer Engine use. With C context-parallel ranks every sequence is cut in 2C equal
chunks and rank r holds chunks r and 2C-1-r, one after the other; packed sequences are cut each by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.microbatch import context_positions


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Megatron's parameters of a packed batch, with the sequence lengths on the host so that no layer asks for them."""

    lengths: tuple[int, ...] = ()
    """Padded tokens of each sequence before the context-parallel split."""


def packed_parameters(cu_seqlens: Tensor, total: int) -> HostPackedSeqParams:
    """Describe a packed batch to Megatron. Copies ``cu_seqlens`` to the host once.

    Args:
        cu_seqlens: int32 ``[n + 1]``, boundaries of the padded sequences before the context-parallel split.
        total: tokens of the batch before the split; what the boundaries leave over is a sequence of its own.
    """
    bounds = cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] <= total, f"cu_seqlens {bounds} must run from 0 to at most {total}"
    if bounds[-1] < total:
        bounds.append(total)
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([total])])
    lengths = tuple(end - start for start, end in itertools.pairwise(bounds))
    # the true maximum: rotary embeddings take a maximum equal to the total for positions that run over all sequences
    longest = max(lengths)
    return HostPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )


class EagerCoreAttention(MegatronModule):
    """Causal softmax attention of each sequence by itself.

    Keys and values of the other context-parallel ranks are gathered (the backward pass reduce-scatters). Work is
    quadratic in the length of each sequence, not of the packed batch.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ConfigurationError(f"attention_dropout must be 0 with local layers, got {dropout}; set it to 0")
        self.softmax_scale = softmax_scale
        group = getattr(pg_collection, "cp", None)
        self.context_group = parallel_state.get_context_parallel_group() if group is None else group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[s, b, heads, d]``, or ``[t, heads, d]`` packed; s or t tokens on this rank.
            key, value: as query, with the key/value heads.
            attention_mask: not read: a token sees the tokens of its own sequence up to itself.
            packed_seq_params: lengths of the packed sequences.

        Returns:
            ``[s, b, heads * d]``, or ``[t, heads * d]`` packed.
        """
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        size, rank = self.context_group.size(), self.context_group.rank()
        total = query.shape[0] * size
        lengths = _packed_lengths(packed_seq_params, total) if packed else (total,)
        if size > 1:
            order = _sequence_order(tuple(lengths), size, key.device)
            key, value = (
                gather_from_sequence_parallel_region(tensor.contiguous(), group=self.context_group)[order]
                for tensor in (key, value)
            )
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, d]
        outputs, start = [], 0
        for length in lengths:
            rows, columns = slice(start // size, (start + length) // size), slice(start, start + length)
            outputs.append(
                self._attend(query[:, :, rows], key[:, :, columns], value[:, :, columns], length, size, rank)
            )
            start += length
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        output = output.permute(2, 0, 1, 3).flatten(-2)
        return output.squeeze(1) if packed else output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, length: int, size: int, rank: int) -> Tensor:
        """One sequence: this rank's rows of the queries, all keys in order."""
        mask = None
        if size > 1:
            positions = context_positions(torch.tensor([length]), size, rank).to(query.device)
            mask = torch.arange(length, device=query.device)[None] <= positions[:, None]
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _packed_lengths(parameters: PackedSeqParams, total: int) -> Sequence[int]:
    if isinstance(parameters, HostPackedSeqParams):
        lengths = parameters.lengths
    else:
        bounds = parameters.cu_seqlens_q_padded
        lengths = packed_parameters(parameters.cu_seqlens_q if bounds is None else bounds, total).lengths
    assert sum(lengths) == total, f"packed sequences have {sum(lengths)} tokens, the batch {total}"
    return [length for length in lengths if length]


@lru_cache(maxsize=8)  # every layer asks
def _sequence_order(lengths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Where each token of the whole batch is in the concatenation of the ranks' shards: int64 ``[total]``."""
    segments = torch.tensor(lengths)
    return torch.cat([context_positions(segments, size, rank) for rank in range(size)]).argsort().to(device)
