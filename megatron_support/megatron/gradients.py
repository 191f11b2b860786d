"""Whole gradients out of any layout, for comparing layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.parts import ModelParts
from megatron_support.megatron.weights.sharding import global_name

_TIED_COPY, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class WholeGradients:
    """Every parameter's reduced gradient under its name in the whole model, on the host."""

    tensors: dict[str, Tensor]
    """fp32. The copy of a tied embedding on the last pipeline stage is ``output_layer.weight``."""
    disagreement: float
    """Largest relative difference between the norms of two ranks' copies of one gradient; 0 in one process."""

    def counterpart(self, name: str) -> Tensor:
        """The gradient that ``name`` of another layout is to be compared with.

        Raises:
            KeyError: there is none.
        """
        if name == _TIED_COPY and name not in self.tensors:
            return self.tensors[_EMBEDDING]
        return self.tensors[name]


def whole_gradients(model: ModelParts, groups: ParallelGroups) -> WholeGradients | None:
    """Put the shards of every gradient together on rank 0. Collective; call it after a step without clipping.

    Tensor-parallel shards are joined inside their group. Of the ranks that then hold a parameter (pipeline stages,
    copies of data- and context-parallel ranks, ranks with experts of their own) the lowest sends it to rank 0, one
    parameter at a time, and all say its norm.

    Args:
        model: in Megatron's DistributedDataParallel, with gradients reduced; sharded ones (DistributedOptimizer) are
            gathered into its buffers.
        groups: the ranks' layout.

    Returns:
        None on the other ranks.
    """
    for chunk in model.chunks:
        _gather_buffers(cast(DistributedDataParallel, chunk))
    own: dict[str, Tensor] = {}
    for bare in model.bare_chunks:
        for name, parameter in bare.named_parameters():
            own[global_name(bare, name)] = _whole(name, parameter, model, groups)
    facts = [(name, tuple(tensor.shape), float(tensor.double().norm())) for name, tensor in own.items()]
    if groups.world is None:
        return WholeGradients(tensors={name: _kept(tensor) for name, tensor in own.items()}, disagreement=0.0)
    held: list[list[tuple[str, tuple[int, ...], float]]] = [[] for _ in range(groups.world_size)]
    dist.all_gather_object(held, facts, group=groups.world)
    return _collect(own, held, model.device, groups)


def _collect(own: dict[str, Tensor], held: list[Any], device: torch.device, groups: ParallelGroups) -> Any:
    """Rank 0 receives each parameter from the lowest rank that has it."""
    collected: dict[str, Tensor] = {}
    norms: dict[str, float] = {}
    disagreement = 0.0
    for rank, facts in enumerate(held):
        for name, shape, norm in facts:
            if name in norms:
                largest = max(abs(norms[name]), abs(norm))
                disagreement = max(disagreement, abs(norm - norms[name]) / largest if largest else 0.0)
                continue
            norms[name] = norm
            if rank == 0 and groups.is_main:
                collected[name] = _kept(own[name])
            elif groups.is_main:
                received = torch.empty(shape, dtype=torch.float32, device=device)
                dist.recv(received, src=rank)
                collected[name] = received.cpu()
            elif groups.world_rank == rank:
                dist.send(own[name].float().contiguous(), dst=0)
    return WholeGradients(tensors=collected, disagreement=disagreement) if groups.is_main else None


def _kept(gradient: Tensor) -> Tensor:
    """A copy on the host: the next step overwrites the buffer that the gradient lies in."""
    return gradient.to("cpu", torch.float32, copy=True)


def _gather_buffers(chunk: DistributedDataParallel) -> None:
    """Under DistributedOptimizer a rank has reduced only its part of each bucket: fetch the other parts."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = list(bucket.grad_data.chunk(group.size()))
            gathered = [torch.empty_like(part) for part in parts]
            dist.all_gather(gathered, parts[group.rank()].clone(), group=group)
            for part, value in zip(parts, gathered, strict=True):
                part.copy_(value)


def _whole(name: str, parameter: Any, model: ModelParts, groups: ParallelGroups) -> Tensor:
    """A parameter's gradient with the shards of the tensor-parallel group joined; experts are not cut."""
    gradient: Tensor = parameter.main_grad
    is_expert = not getattr(parameter, "allreduce", True)
    if groups.tensor is None or is_expert or not getattr(parameter, "tensor_model_parallel", False):
        return gradient
    shards = [torch.empty_like(gradient) for _ in range(groups.tensor_size)]
    dist.all_gather(shards, gradient.contiguous(), group=groups.tensor)
    dim: int = parameter.partition_dim
    # each rank has its slice of the gate above its slice of the up projection
    stripes = 2 if name.endswith("linear_fc1.weight") and model.config.gated_linear_unit else 1
    pieces = [shard.chunk(stripes, dim) for shard in shards]
    return torch.cat([piece[stripe] for stripe in range(stripes) for piece in pieces], dim)
