"""A model as a Hugging Face folder: config.json beside safetensors files, as transformers and vLLM read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_support.config.layout import head_dim, query_groups
from megatron_support.config.recipe import Architecture
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.parts import ModelParts
from megatron_support.megatron.weights.huggingface import INDEX, SINGLE, require_safetensors
from megatron_support.megatron.weights.sharding import whole_tensors

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def export_huggingface(model: ModelParts, folder: Path, *, max_file_bytes: int = 5 * 2**30) -> None:
    """Write a dense model.

    Args:
        model: held by this rank alone; its precision is kept.
        folder: made; must be empty.
        max_file_bytes: a file holds at most this, or one tensor.

    Raises:
        ConfigurationError: the folder cannot be used, or no Hugging Face model has this architecture.
    """
    require_safetensors()
    config = huggingface_config(model)
    tensors = whole_tensors(
        model.bare_chunks, architecture=model.architecture, padded_vocab_size=model.padded_vocab_size
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigurationError(f"{folder}: must be an empty folder, or none; choose another")
        _write_tensors(folder, tensors, max_file_bytes)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be written ({error.strerror}); choose another") from None


def huggingface_config(model: ModelParts) -> dict[str, Any]:
    """The config.json of a model.

    Raises:
        ConfigurationError: it has experts, or biases and norms of queries and keys together.
    """
    architecture = model.architecture
    kind = _kind(architecture)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": architecture.vocab_size,
        "num_hidden_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": query_groups(architecture),
        "head_dim": head_dim(architecture),
        "max_position_embeddings": architecture.max_sequence_length,
        "hidden_act": "silu",
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_theta": architecture.rope_base,
        "tie_word_embeddings": architecture.tie_embeddings,
        "torch_dtype": str(model.config.params_dtype).removeprefix("torch."),
    }
    if architecture.rope_scaling is not None:
        config["rope_scaling"] = dict(architecture.rope_scaling)
    return config


def _kind(architecture: Architecture) -> str:
    if architecture.moe is not None:
        raise ConfigurationError("only dense models are exported to Hugging Face, got one with experts")
    if architecture.qkv_bias and architecture.qk_norm:
        raise ConfigurationError(
            "no Hugging Face model of the Llama family has both qkv_bias and qk_norm, got both; nothing can read it"
        )
    return "qwen3" if architecture.qk_norm else "qwen2" if architecture.qkv_bias else "llama"


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int) -> None:
    """One file, or several and their index; only one file's tensors are held at a time."""
    files: list[list[str]] = []
    part: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > max_file_bytes:
            files.append(_write_part(folder, len(files), part))
            part, size = {}, 0
        part[name] = tensor.cpu().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    files.append(_write_part(folder, len(files), part))
    if len(files) == 1:
        (folder / _part_name(0)).rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        path = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / _part_name(index)).rename(folder / path)
        weight_map |= dict.fromkeys(names, path)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_part(folder: Path, index: int, part: dict[str, Tensor]) -> list[str]:
    from safetensors.torch import save_file

    path = folder / _part_name(index)
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; safetensors replaces the file by one for its owner alone
    save_file(part, path, metadata={"format": "pt"})
    path.chmod(mode)
    return list(part)


def _part_name(index: int) -> str:
    return f"part-{index}.safetensors"
