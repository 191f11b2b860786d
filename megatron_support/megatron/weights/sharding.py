"""Full tensors -> this rank's Megatron parameters: fused QKV and gate/up, tensor slices, global layer numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_support.config.layout import head_dim, query_groups
from megatron_support.config.recipe import Architecture
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.weights.names import EMBEDDING, FINAL_NORM, OUTPUT, layer_name, tensor_shapes
from megatron_support.megatron.weights.source import WeightSource

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@torch.no_grad()
def fill_parameters(
    chunks: Sequence[nn.Module],
    source: WeightSource,
    *,
    architecture: Architecture,
    groups: ParallelGroups,
    padded_vocab_size: int,
) -> None:
    """Write every parameter of this rank's model chunks, in place, reading only the layers it holds.

    Args:
        chunks: GPTModel without wrappers, with local or Transformer Engine layers.
        source: the full tensors.
        architecture: the model's.
        groups: which shard is ours.
        padded_vocab_size: rows of the whole embedding; rows beyond the vocabulary become 0.
    """
    shards = _Shards(source, architecture, groups.tensor_size, groups.tensor_rank, padded_vocab_size)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            value = shards.parameter(global_name(chunk, name))
            assert value.shape == parameter.shape, f"{name}: made {tuple(value.shape)} for {tuple(parameter.shape)}"
            parameter.data.copy_(value)


@torch.no_grad()
def whole_tensors(
    chunks: Sequence[nn.Module], *, architecture: Architecture, padded_vocab_size: int
) -> Iterator[tuple[str, Tensor]]:
    """The other way round: the full tensors out of the parameters of a model that one rank holds alone.

    The rules that fill parameters are run on numbered elements, which says where each element of a parameter came from.

    Args:
        chunks: GPTModel without wrappers, without tensor or pipeline parallelism.
        architecture: the model's.
        padded_vocab_size: rows of the embedding; those beyond the vocabulary are left out.

    Yields:
        Name and tensor, in the precision and on the device of the parameter; one parameter's at a time.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            numbers = _Numbers(tensor_shapes(architecture))
            shards = _Shards(numbers, architecture, 1, 0, padded_vocab_size)
            origins = shards.parameter(global_name(chunk, name)).flatten()
            values = parameter.data.flatten()
            whole = values.new_empty(numbers.count + 1)
            whole[origins.to(values.device)] = values  # padding is number 0
            for tensor_name, first in numbers.first.items():
                shape = numbers.shapes[tensor_name]
                yield tensor_name, whole[first : first + math.prod(shape)].view(shape).clone()


def global_name(chunk: nn.Module, name: str) -> str:
    """A parameter's name with layer and expert counted from 0 over the whole model instead of over the rank's part."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer: Any = chunk.get_submodule(f"decoder.layers.{match[1]}")
    rest = match[2]
    if expert := _EXPERT.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{layer.mlp.local_expert_indices[int(expert[1])]}.{expert[2]}"
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"


@dataclass(frozen=True)
class _Shards:
    """One tensor-parallel rank's parameters by Megatron name."""

    source: WeightSource
    architecture: Architecture
    size: int
    rank: int
    padded_vocab_size: int

    def parameter(self, name: str) -> Tensor:
        if name == "embedding.word_embeddings.weight":
            return self.vocabulary(EMBEDDING)
        if name == "output_layer.weight":
            return self.vocabulary(EMBEDDING if self.architecture.tie_embeddings else OUTPUT)
        if name == "decoder.final_layernorm.weight":
            return self.source.tensor(FINAL_NORM)
        match = _LAYER.fullmatch(name)
        assert match is not None, f"no rule for the Megatron parameter {name}"
        layer, rest, prefix = int(match[1]), match[2], ""
        shards = self
        if expert := _EXPERT.fullmatch(rest):
            rest, prefix = f"mlp.{expert[2]}", f"mlp.experts.{expert[1]}."
            shards = replace(self, size=1, rank=0)  # an expert is whole, whatever the tensor-parallel size
        elif rest.startswith("mlp.shared_experts.linear"):
            rest, prefix = rest.replace("shared_experts.", ""), "mlp.shared_expert."
        assert rest in _RULES, f"no rule for the Megatron parameter {name}"

        def read(part: str) -> Tensor:
            return self.source.tensor(layer_name(layer, part.replace("mlp.", prefix) if prefix else part))

        return _RULES[rest](shards, read)

    def slice(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank]

    def vocabulary(self, name: str) -> Tensor:
        rows = self.padded_vocab_size // self.size
        tensor = self.source.tensor(name)[self.rank * rows : (self.rank + 1) * rows]
        return nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))

    def qkv(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Megatron interleaves by query group: its queries, its key, its value, then the next group."""
        groups, size = query_groups(self.architecture), head_dim(self.architecture)
        parts = [tensor.view(groups, -1, size, *tensor.shape[1:]) for tensor in (query, key, value)]
        return self.slice(torch.cat(parts, dim=1)).flatten(0, 2)

    def gate_and_up(self, gate: Tensor, up: Tensor) -> Tensor:
        """Each rank has its slice of the gate above its slice of the up projection."""
        return torch.cat([self.slice(gate), self.slice(up)])


@dataclass
class _Numbers:
    """A source whose tensors number their elements, from 1, in the order in which they are asked for."""

    shapes: dict[str, tuple[int, ...]]
    first: dict[str, int] = field(default_factory=dict)
    count: int = 0

    @property
    def origin(self) -> str:
        return "numbers"

    def tensor(self, name: str) -> Tensor:
        size = math.prod(self.shapes[name])
        self.first[name] = self.count + 1
        self.count += size
        return torch.arange(self.first[name], self.count + 1).view(self.shapes[name])


_Read = Callable[[str], Tensor]
_Rule = Callable[[_Shards, _Read], Tensor]


def _whole(name: str) -> _Rule:
    return lambda shards, read: read(name)


def _qkv(kind: str) -> _Rule:
    return lambda shards, read: shards.qkv(*(read(f"self_attn.{part}_proj.{kind}") for part in "qkv"))


_RULES: dict[str, _Rule] = {
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _whole("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": _whole("self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": lambda shards, read: shards.slice(read("self_attn.o_proj.weight"), 1),
    "mlp.linear_fc1.weight": lambda shards, read: shards.gate_and_up(
        read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")
    ),
    "mlp.linear_fc2.weight": lambda shards, read: shards.slice(read("mlp.down_proj.weight"), 1),
    "mlp.router.weight": _whole("mlp.gate.weight"),
    "mlp.shared_experts.gate_weight": _whole("mlp.shared_expert_gate.weight"),
    # local layers have norms of their own, Transformer Engine's linear layers have them inside
    "input_layernorm.weight": _whole("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": _whole("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": _whole("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": _whole("post_attention_layernorm.weight"),
}
