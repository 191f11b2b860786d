"""Weights of a recipe: random, Hugging Face or GGUF straight into this rank's shards, or a Megatron checkpoint."""

from __future__ import annotations

from megatron_support.config.recipe import (
    Architecture,
    GGUFWeights,
    HuggingFaceWeights,
    MegatronWeights,
    ModelConfig,
    Weights,
)
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.checkpoint import load_model_weights
from megatron_support.megatron.parts import ModelParts
from megatron_support.megatron.weights.gguf import GGUFSource, read_gguf_architecture
from megatron_support.megatron.weights.huggingface import HuggingFaceSource, read_huggingface_architecture
from megatron_support.megatron.weights.sharding import fill_parameters
from megatron_support.megatron.weights.source import RandomSource, WeightSource

__all__ = ["RandomSource", "WeightSource", "load_weights", "model_architecture", "read_architecture"]


def read_architecture(weights: Weights) -> Architecture:
    """The architecture that Hugging Face or GGUF weights carry. Reads metadata only and needs no process group.

    Raises:
        ConfigurationError: the file is missing, unreadable or of an unsupported kind; or the weights carry none.
    """
    if isinstance(weights, HuggingFaceWeights):
        return read_huggingface_architecture(weights.path)
    if isinstance(weights, GGUFWeights):
        return read_gguf_architecture(weights.path)
    raise ConfigurationError(f"weights of type {weights.type!r} carry no architecture; add model.architecture")


def model_architecture(config: ModelConfig) -> Architecture:
    """The architecture of a recipe's model: given, or read from its weights."""
    return config.architecture or read_architecture(config.weights)


def load_weights(model: ModelParts, weights: Weights, *, groups: ParallelGroups, seed: int = 0) -> None:
    """Write weights into a model in place, wrapped or not. Collective for ``weights.type: megatron``.

    With bf16 parameters and an optimizer that exists already, call ``optimizer.reload_model_params()`` afterwards.

    Args:
        model: this rank's chunks.
        weights: where from.
        groups: the ranks' layout.
        seed: of random weights.

    Raises:
        ConfigurationError: the file is missing, unreadable, or another model's.
    """
    if isinstance(weights, MegatronWeights):
        load_model_weights(weights.path, model)
        return
    source: HuggingFaceSource | GGUFSource | RandomSource
    if isinstance(weights, HuggingFaceWeights):
        source = HuggingFaceSource(weights.path)
    elif isinstance(weights, GGUFWeights):
        source = GGUFSource(weights.path)
    else:
        source = RandomSource(model.architecture, seed)
    if not isinstance(source, RandomSource):
        _require_same_model(source.architecture, model.architecture, source.origin)
    fill_parameters(
        model.bare_chunks,
        source,
        architecture=model.architecture,
        groups=groups,
        padded_vocab_size=model.padded_vocab_size,
    )


def _require_same_model(found: Architecture, wanted: Architecture, origin: str) -> None:
    differing = [
        f"{name} {getattr(found, name)!r} instead of {getattr(wanted, name)!r}"
        for name in Architecture.model_fields
        if getattr(found, name) != getattr(wanted, name) and name != "max_sequence_length"
    ]
    if differing:
        raise ConfigurationError(
            f"{origin}: weights must be of the same architecture as the model, got {', '.join(differing)}; "
            "use weights of the same model"
        )
