"""A checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from megatron_support.config.recipe import MegatronWeights, ModelConfig, ParallelConfig
from megatron_support.megatron.checkpoint import read_saved_model
from megatron_support.megatron.host import running_host
from megatron_support.megatron.model import build_model
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.megatron.weights.export import export_huggingface
from megatron_support.megatron.weights.huggingface import require_safetensors
from megatron_support.training.saved import find_checkpoint, recipe_of, run_of

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "generation_config.json")


def export_checkpoint(path: str | Path, out: str | Path) -> Path:
    """Gather the weights of a checkpoint, whatever layout wrote it, on this process alone, and write them.

    Where the run began with a Hugging Face folder, its tokenizer goes along.

    Args:
        path: a checkpoint folder, or a run folder: then its newest checkpoint, or its final weights.
        out: the folder to write.

    Returns:
        The checkpoint that was taken.

    Raises:
        ConfigurationError: the extra ``hf`` is missing, there is no checkpoint, it cannot be exported, or ``out``
            cannot be written.
    """
    require_safetensors()
    checkpoint = find_checkpoint(Path(path).expanduser())
    folder = Path(out).expanduser()
    with running_host("cpu"):
        layout = ParallelConfig()
        groups = initialize_parallel(layout)
        architecture, dtype = read_saved_model(checkpoint)
        config = ModelConfig(
            architecture=architecture,
            weights=MegatronWeights(type="megatron", path=str(checkpoint)),
            dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        )
        export_huggingface(build_model(config, layout, groups, seed=0), folder)
    _copy_tokenizer(checkpoint, folder)
    return checkpoint


def _copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    recipe = recipe_of(run_of(checkpoint))
    if recipe is None or recipe.model.weights.type != "huggingface":
        return
    for pattern in _TOKENIZER_FILES:
        for file in Path(recipe.model.weights.path).glob(pattern):
            shutil.copy(file, folder / file.name)
