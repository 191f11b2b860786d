"""Weights of a Hugging Face folder: config.json beside one or several safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_support.config.recipe import Architecture
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.weights.names import OUTPUT
from megatron_support.megatron.weights.source import check_tensors

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_QWEN3 = ("qwen3", "qwen3_moe")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def require_safetensors() -> None:
    """Check that Hugging Face weights can be read and written here.

    Raises:
        ConfigurationError: the package is missing.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "Hugging Face weights need the package safetensors; pip install 'megatron-support[hf]'"
        ) from error


class HuggingFaceSource:
    """Tensors of a Hugging Face folder, each read from its file when it is asked for.

    Args:
        path: the folder.

    Raises:
        ConfigurationError: the folder is not that of a Llama, Qwen2, Qwen3 or Qwen3-MoE model, or is incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        self._folder = Path(path).expanduser()
        self.architecture = read_huggingface_architecture(self._folder)
        self._files = self._open()
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}
        ignorable = {name for name in shapes if name.endswith("rotary_emb.inv_freq")} | {OUTPUT}
        check_tensors(shapes, self.architecture, origin=self.origin, ignorable=ignorable)

    @property
    def origin(self) -> str:
        return str(self._folder)

    def tensor(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def _open(self) -> dict[str, Any]:
        """An open file for every tensor name."""
        require_safetensors()
        from safetensors import SafetensorError, safe_open

        files: dict[str, Any] = {}
        for path in self._paths():
            if not path.is_file():
                raise ConfigurationError(f"{path}: file is missing; download the complete model folder again")
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ConfigurationError(
                    f"{path}: not a readable safetensors file ({error}); download it again"
                ) from error
            files |= dict.fromkeys(file.keys(), file)
        return files

    def _paths(self) -> list[Path]:
        index = self._folder / INDEX
        if not index.is_file():
            if not (self._folder / SINGLE).is_file() and list(self._folder.glob("*.bin")):
                raise ConfigurationError(
                    f"{self._folder}: weights must be safetensors, found only .bin files; "
                    "load the model with transformers and save it with save_pretrained(folder, safe_serialization=True)"
                )
            return [self._folder / SINGLE]
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigurationError(f"{index}: 'weight_map' must be a mapping, got {weight_map!r}; download it again")
        for name in weight_map.values():
            if not isinstance(name, str) or name != Path(name).name or "\0" in name:
                raise ConfigurationError(
                    f"{index}: 'weight_map' must name files of its own folder, got {name!r}; download it again"
                )
        return [self._folder / name for name in sorted(set(weight_map.values()))]


def read_huggingface_architecture(path: str | Path) -> Architecture:
    """The architecture in a Hugging Face folder's config.json.

    Raises:
        ConfigurationError: the folder or a field is missing, or the model is of a kind that is not supported.
    """
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigurationError(
            f"model.weights.path must be a folder with config.json and safetensors files, got {str(path)!r}; "
            "download the model (huggingface-cli download NAME --local-dir FOLDER) and give that folder"
        )
    config = _read_json(file)
    _refuse_unsupported(config, file)
    rope = _rope(config, file)
    kind = config["model_type"]
    heads = _required(config, "num_attention_heads", file)
    fields = {
        "vocab_size": _required(config, "vocab_size", file),
        "num_layers": _required(config, "num_hidden_layers", file),
        "hidden_size": _required(config, "hidden_size", file),
        "num_attention_heads": heads,
        "ffn_hidden_size": _required(config, "intermediate_size", file),
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (128 if kind in _QWEN3 else None),  # their configs' own default
        "max_sequence_length": config.get("max_position_embeddings", 2048),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope_base": rope["rope_theta"],
        "rope_scaling": rope if rope.get("rope_type") == "llama3" else None,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind in _QWEN3,
        "moe": _experts(config, file) if kind == "qwen3_moe" else None,
    }
    return Architecture.from_dict(fields, source=str(file))


def _experts(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Without auxiliary losses, which a config.json has for pretraining."""
    return {
        # transformers 5 writes the other name
        "num_experts": _required(config, "num_local_experts" if "num_local_experts" in config else "num_experts", file),
        "top_k": _required(config, "num_experts_per_tok", file),
        "ffn_hidden_size": _required(config, "moe_intermediate_size", file),
        "normalize_top_k": bool(config.get("norm_topk_prob", False)),
    }


def _rope(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """``rope_theta``, ``rope_type`` and the scaling's numbers, from the older and the newer form of config.json."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        settings = config.get(name) or {}
        if not isinstance(settings, dict):
            raise ConfigurationError(f"{file}: {name} must be a mapping, got {settings!r}; download the file again")
        rope |= settings
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    return rope


def _refuse_unsupported(config: Mapping[str, Any], file: Path) -> None:
    kind = config.get("model_type")
    rope = _rope(config, file)
    refused = (
        (kind not in MODEL_TYPES, f"model_type must be one of {', '.join(MODEL_TYPES)}, got {kind!r}"),
        (config.get("hidden_act", "silu") != "silu", f"hidden_act must be silu, got {config.get('hidden_act')!r}"),
        (bool(config.get("mlp_bias")), "mlp_bias must be false, got true"),
        (kind != "qwen2" and bool(config.get("attention_bias")), "attention_bias must be false, got true"),
        (bool(config.get("use_sliding_window")), "use_sliding_window must be false, got true"),
        (
            kind == "qwen3_moe" and (config.get("decoder_sparse_step", 1) != 1 or bool(config.get("mlp_only_layers"))),
            "every layer must have experts, got decoder_sparse_step or mlp_only_layers",
        ),
        ("quantization_config" in config, "weights must not be quantised, got a quantization_config"),
        (
            rope["rope_type"] not in ("default", "llama3"),
            f"rope_type must be default or llama3, got {rope['rope_type']!r}",
        ),
    )
    for broken, rule in refused:
        if broken:
            raise ConfigurationError(f"{file}: {rule}; use a Llama, Qwen2, Qwen3 or Qwen3-MoE model without it")


def _required(config: Mapping[str, Any], name: str, file: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{file}: {name} must be an integer >= 1, got {value!r}; download the file again")
    return value


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigurationError(f"{file}: must be a regular file; download it again")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file}: not a readable JSON file ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{file}: must hold a JSON object, got {type(value).__name__}; download it again")
    return value
