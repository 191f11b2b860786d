"""This rank's part of the model, and one microbatch through one of its chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_support.config.recipe import Architecture
from megatron_support.megatron.attention import packed_parameters
from megatron_support.types import TokenBatch


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """This rank's part of the model."""

    chunks: tuple[nn.Module, ...]
    """Model chunks in pipeline order: one, or ``virtual_pipeline`` of them. Bare, in Float16Module, or in DDP."""
    config: TransformerConfig
    """Megatron's, shared by all chunks. The training loop may set its hooks (``finalize_model_grads_func``, ...)."""
    architecture: Architecture
    """With the true vocabulary size."""
    padded_vocab_size: int
    """Rows of the whole embedding; each tensor-parallel rank holds an equal part."""
    device: torch.device
    virtual_pipeline: int | None = None
    """Chunks per pipeline rank of the interleaved schedule, or None."""

    @property
    def vocab_size(self) -> int:
        """The true vocabulary size."""
        return self.architecture.vocab_size

    @property
    def bare_chunks(self) -> tuple[GPTModel, ...]:
        """The chunks without wrappers."""
        return tuple(unwrap(chunk) for chunk in self.chunks)


def model_forward(chunk: nn.Module, batch: TokenBatch) -> Tensor:
    """One microbatch through one model chunk.

    Args:
        chunk: bare or wrapped. On a later stage the schedule has set its input.
        batch: this rank's context-parallel shard.

    Returns:
        On the last stage vocab-parallel logits ``[T, V/TP]`` in the model's dtype, T tokens in the order of
        ``batch.input_ids.flatten()``; elsewhere the activation ``[s, b, hidden]`` for the next stage.
    """
    output = call_chunk(chunk, batch)
    return output.flatten(0, 1) if unwrap(chunk).post_process else output


def call_chunk(chunk: nn.Module, batch: TokenBatch, **options: Any) -> Tensor:
    """What GPTModel returns for a microbatch; ``options`` are further arguments of its forward."""
    if _has_wrapper(chunk, Float16Module):
        options["fp32_output"] = False
    packed = None
    if batch.cu_seqlens is not None:
        context = unwrap(chunk).config.context_parallel_size
        packed = packed_parameters(batch.cu_seqlens, batch.input_ids.numel() * context)
    return chunk(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=packed,
        **options,
    )


def gather_parameters(model: ModelParts) -> None:
    """Wait for parameters that Megatron would gather only in the next forward pass, so that others may read them.

    Does nothing without ``overlap_param_gather``. Collective with it.
    """
    for chunk in model.chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def gather_parameter(chunk: nn.Module, parameter: Tensor) -> None:
    """The same for one parameter of a chunk, which is about to be read outside of its own module's forward."""
    if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
        chunk.param_to_bucket_group[parameter].finish_param_sync()


@contextlib.contextmanager
def evaluating(model: ModelParts) -> Iterator[None]:
    """Evaluation mode for the length of a block; each chunk's mode returns afterwards, also after an exception."""
    modes = [chunk.training for chunk in model.chunks]
    try:
        for chunk in model.chunks:
            chunk.eval()
        yield
    finally:
        for chunk, mode in zip(model.chunks, modes, strict=True):
            chunk.train(mode)


def unwrap(chunk: nn.Module) -> GPTModel:
    """The GPTModel inside Float16Module and DDP."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _has_wrapper(chunk: nn.Module, kind: type[nn.Module]) -> bool:
    while not isinstance(chunk, GPTModel):
        if isinstance(chunk, kind):
            return True
        chunk = chunk.module  # type: ignore[assignment]
    return False
