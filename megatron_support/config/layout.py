"""Which layouts a model and a number of ranks allow: rules of the recipe alone, without torch and Megatron."""

from __future__ import annotations

import math

from megatron_support.config.recipe import Architecture, ParallelConfig, Recipe
from megatron_support.errors import ConfigurationError


def validate_layout(architecture: Architecture | None, parallel: ParallelConfig, world_size: int) -> None:
    """Check that a model can be laid out over a number of ranks. Needs no process group.

    Args:
        architecture: None checks the world size alone.
        parallel: the layout asked for.
        world_size: number of ranks.

    Raises:
        ConfigurationError: one line for each broken rule, naming field, value and remedy.
    """
    errors = list(_world_errors(parallel, world_size))
    if architecture is not None:
        errors += [*_architecture_errors(architecture), *_tensor_errors(architecture, parallel)]
        errors += _pipeline_errors(architecture, parallel)
        errors += _expert_errors(architecture, parallel)
    if errors:
        raise ConfigurationError("\n".join(errors))


def smallest_world(recipe: Recipe) -> int:
    """The least number of ranks that a recipe runs on."""
    parallel = recipe.parallel
    return parallel.pipeline * math.lcm(parallel.tensor * parallel.context, parallel.expert)


def _world_errors(parallel: ParallelConfig, world_size: int) -> list[str]:
    model = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % model == 0:
        shared = world_size // parallel.pipeline
        if shared % parallel.expert == 0:
            return []
        return [
            f"parallel.expert must divide the {shared} ranks of a pipeline stage, "
            f"got {parallel.expert}; use one of {_divisors(shared)}"
        ]
    return [
        "parallel: tensor x pipeline x context = "
        f"{parallel.tensor} x {parallel.pipeline} x {parallel.context} = {model} "
        f"must divide the number of ranks, got {world_size}; "
        f"start a multiple of {model} ranks (--ranks {model}, or torchrun --nproc-per-node {model}) "
        "or lower one of them"
    ]


def _architecture_errors(architecture: Architecture) -> list[str]:
    """Rules of the model itself; they are here because each is about something dividing something else."""
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    errors = []
    if architecture.head_dim is None and architecture.hidden_size % heads:
        errors.append(
            f"model.architecture.hidden_size must be a multiple of num_attention_heads {heads} when head_dim is null, "
            f"got {architecture.hidden_size}; change one of them or give head_dim"
        )
    elif head_dim(architecture) % 2:
        errors.append(
            f"model.architecture.head_dim must be even for rotary embeddings, got {head_dim(architecture)}; "
            "change it, hidden_size or num_attention_heads"
        )
    if groups is not None and heads % groups:
        errors.append(
            f"model.architecture.num_query_groups must divide num_attention_heads {heads}, got {groups}; "
            f"use one of {_divisors(heads)}"
        )
    return errors


def _tensor_errors(architecture: Architecture, parallel: ParallelConfig) -> list[str]:
    sizes = {
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
    }
    if architecture.moe is None:
        sizes["ffn_hidden_size"] = architecture.ffn_hidden_size
    else:
        sizes["moe.shared_expert_ffn_hidden_size"] = architecture.moe.shared_expert_ffn_hidden_size
    given = {name: size for name, size in sizes.items() if size is not None}
    possible = [n for n in range(1, parallel.tensor + 1) if all(size % n == 0 for size in given.values())]
    return [
        f"parallel.tensor must divide model.architecture.{name} {size}, got {parallel.tensor}; "
        f"sizes up to {parallel.tensor} that fit this model: {possible}"
        for name, size in given.items()
        if size % parallel.tensor
    ]


def _pipeline_errors(architecture: Architecture, parallel: ParallelConfig) -> list[str]:
    layers, stages = architecture.num_layers, parallel.pipeline
    if layers % stages:
        return [
            f"parallel.pipeline must divide model.architecture.num_layers {layers}, got {stages}; "
            f"use one of {_divisors(layers)}"
        ]
    chunks = parallel.virtual_pipeline
    if chunks is not None and layers % (stages * chunks):
        return [
            f"parallel.virtual_pipeline must divide num_layers / pipeline = {layers} / {stages} = {layers // stages}, "
            f"got {chunks}; use one of {[d for d in _divisors(layers // stages) if d > 1]} or null"
        ]
    return _recompute_errors(parallel, layers // (stages * (chunks or 1)))


def _expert_errors(architecture: Architecture, parallel: ParallelConfig) -> list[str]:
    moe = architecture.moe
    if moe is None:
        if parallel.expert == 1:
            return []
        return [f"parallel.expert must be 1 for a dense model, got {parallel.expert}; use 1, or give architecture.moe"]
    errors = []
    if moe.num_experts % parallel.expert:
        errors.append(
            f"parallel.expert must divide model.architecture.moe.num_experts {moe.num_experts}, "
            f"got {parallel.expert}; use one of {_divisors(moe.num_experts)}"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        errors.append(
            f"parallel.sequence must be true with parallel.tensor {parallel.tensor} and experts, got false: "
            "Megatron's experts take tokens that are split over the tensor-parallel ranks; set it to true"
        )
    return errors


def _recompute_errors(parallel: ParallelConfig, layers: int) -> list[str]:
    """``layers`` are those of one model chunk: Megatron walks over the layers of a chunk in steps of ``num_layers``."""
    recompute = parallel.recompute
    if recompute is None or recompute.type != "full":
        return []
    if recompute.method == "uniform" and layers % recompute.num_layers:
        return [
            f"parallel.recompute.num_layers must divide the {layers} layers of a model chunk with method uniform, "
            f"got {recompute.num_layers}; use one of {_divisors(layers)}"
        ]
    if recompute.num_layers > layers:
        return [
            f"parallel.recompute.num_layers must be at most the {layers} layers of a model chunk, "
            f"got {recompute.num_layers}; lower it"
        ]
    return []


def head_dim(architecture: Architecture) -> int:
    """Size of one attention head."""
    return architecture.head_dim or architecture.hidden_size // architecture.num_attention_heads


def query_groups(architecture: Architecture) -> int:
    """Number of key/value heads."""
    return architecture.num_query_groups or architecture.num_attention_heads


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
