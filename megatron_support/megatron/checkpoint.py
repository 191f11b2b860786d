"""Distributed checkpoints (megatron.core.dist_checkpointing): any layout may load what any other saved."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_support.config.recipe import Architecture
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.checkpoint_writer import CheckpointWriter
from megatron_support.megatron.parts import ModelParts
from megatron_support.megatron.rng import random_state, restore_random_state

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# canonical optimizer state: one tensor per parameter, whatever the data-, tensor- and pipeline-parallel layout
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
_LATEST = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a checkpoint holds of a run besides model, optimizer and schedule."""

    step: int
    """Actor steps done; 0 where none was saved."""
    progress: Mapping[str, Any]
    """What the loop gave with it; empty where it gave nothing."""
    same_layout: bool
    """Whether the ranks are laid out as they were, and so have their random state back."""


def save_checkpoint(
    path: str | Path,
    model: ModelParts,
    *,
    optimizer: MegatronOptimizer | None = None,
    scheduler: OptimizerParamScheduler | None = None,
    step: int = 0,
) -> None:
    """Write a checkpoint folder, which is there whole or not at all. Collective.

    Args:
        path: the folder; there must be none of that name, or an empty one.
        model: this rank's chunks.
        optimizer: with it the run can be continued, without it there are weights alone.
        scheduler: saved with the optimizer.
        step: actor steps done.

    Raises:
        ConfigurationError: the folder is not empty.
        CheckpointError: it cannot be written; on every rank.
    """
    state = checkpoint_state(model, optimizer=optimizer, scheduler=scheduler, step=step)
    CheckpointWriter(model.device).save(Path(path), state, metadata=METADATA)


def checkpoint_state(
    model: ModelParts,
    *,
    optimizer: MegatronOptimizer | None = None,
    scheduler: OptimizerParamScheduler | None = None,
    step: int = 0,
    progress: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that a checkpoint holds, as Megatron-Core's sharded state. Collective.

    Args:
        model: this rank's chunks.
        optimizer: with it the random state of every rank is saved as well.
        scheduler: saved with the optimizer.
        step: actor steps done.
        progress: plain values of the loop; the first rank's are saved.
    """
    state = _model_state(model)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=False, metadata=METADATA)
        state["random"] = _random_state(random_state(model.device))
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    state |= {"step": step, "architecture": model.architecture.model_dump(), "layout": _layout(model)}
    if progress is not None:
        state["progress"] = dict(progress)
    return state


def load_checkpoint(
    path: str | Path,
    model: ModelParts,
    *,
    optimizer: MegatronOptimizer | None = None,
    scheduler: OptimizerParamScheduler | None = None,
) -> SavedRun:
    """Load a checkpoint in place, whatever layout saved it. Collective.

    Args:
        path: folder written by :func:`save_checkpoint`, or a Megatron-LM checkpoint folder for weights alone.
        model: this rank's chunks.
        optimizer: loaded too where given, and the random state of this rank where the layout is the same; without it,
            and with bf16 parameters, an optimizer that exists needs ``reload_model_params()`` afterwards.
        scheduler: loaded too where given.

    Raises:
        ConfigurationError: the folder is no checkpoint, is damaged, is another model's, or has no optimizer state.
    """
    folder = _checkpoint_folder(Path(path))
    common = _common_state(folder)
    _require_same_architecture(common.get("architecture"), model.architecture, folder)
    same_layout = common.get("layout") == _layout(model)
    state = _model_state(model)
    if optimizer is not None:
        if "optimizer" not in common:
            raise ConfigurationError(
                f"{folder}: has no optimizer state; load the weights alone, or save with an optimizer"
            )
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=METADATA)
        if same_layout:
            state["random"] = _random_state(None)
    try:
        with _damage_named(folder):
            loaded = dist_checkpointing.load(state, str(folder))
    except (CheckpointingException, KeyError) as error:
        raise ConfigurationError(
            f"{folder}: weights must be those of the model in the recipe, but {error}; use the matching architecture"
        ) from error
    for key, chunk in _named_chunks(model):
        chunk.load_state_dict(loaded[key])
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
    if scheduler is not None:
        scheduler.num_steps = 0  # load_state_dict adds the saved count to this one
        scheduler.load_state_dict(loaded["scheduler"])
    if "random" in state:
        restore_random_state(loaded["random"], model.device)
    return SavedRun(step=int(loaded.get("step", 0)), progress=loaded.get("progress", {}), same_layout=same_layout)


def load_model_weights(path: str | Path, model: ModelParts) -> None:
    """The weights of a checkpoint, and nothing else of it. Collective."""
    load_checkpoint(path, model)


def read_saved_model(path: str | Path) -> tuple[Architecture, torch.dtype]:
    """Architecture and precision of the model in a checkpoint folder. torch.distributed must be up.

    Raises:
        ConfigurationError: it is no checkpoint, or one that was not written by :func:`save_checkpoint`.
    """
    folder = _checkpoint_folder(Path(path))
    saved = _common_state(folder).get("architecture")
    if saved is None:
        raise ConfigurationError(
            f"{folder}: does not say what model it holds; use a checkpoint of a run of megatron-support"
        )
    with _damage_named(folder):
        metadata = dist_checkpointing.load_tensors_metadata(str(folder))
    (embedding,) = [tensor for key, tensor in metadata.items() if key == "embedding.word_embeddings.weight"]
    return Architecture.from_dict(saved), embedding.dtype


def _named_chunks(model: ModelParts) -> list[tuple[str, Any]]:
    chunks = model.bare_chunks
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]


def _model_state(model: ModelParts) -> dict[str, Any]:
    return {key: chunk.sharded_state_dict(metadata=METADATA) for key, chunk in _named_chunks(model)}


def _random_state(data: Any) -> ShardedObject:
    """One object for each rank of the world."""
    return ShardedObject("random", data, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _layout(model: ModelParts) -> dict[str, Any]:
    """What decides which rank does what."""
    config = model.config
    return {
        "ranks": dist.get_world_size(),
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "virtual_pipeline": config.virtual_pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
    }


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """What torch and Megatron-Core raise at files that are cut off, missing or of another kind, as one message."""
    try:
        yield
    except CheckpointingException:
        raise
    # torch's CheckpointException is no Exception, and holds the tracebacks of all ranks. An AttributeError comes from
    # metadata.json of another shape (0.19), or hides that common.pt is missing (0.16)
    except (
        CheckpointException,
        pickle.UnpicklingError,
        EOFError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        shown = error.__context__ or error if isinstance(error, AttributeError) else error
        reason = (str(shown).strip().splitlines() or [type(shown).__name__])[-1][:200]
        raise ConfigurationError(
            f"{folder}: the checkpoint is damaged or incomplete ({reason}); take an earlier one"
        ) from error


def _common_state(folder: Path) -> dict[str, Any]:
    """What is not sharded: a file of its own before Megatron-Core 0.19, an object among the shards since."""
    try:
        with _damage_named(folder):
            return dist_checkpointing.load_common_state_dict(str(folder))
    except (CheckpointingException, KeyError) as error:
        raise ConfigurationError(
            f"{folder}: the checkpoint is incomplete, it has no {_COMMON}; take an earlier one, or load it with the "
            "Megatron-Core that wrote it"
        ) from error
    except RuntimeError as error:  # a zip file that was cut off
        raise ConfigurationError(
            f"{folder}: the checkpoint is damaged, {_COMMON} cannot be read; take an earlier one"
        ) from error


def _checkpoint_folder(path: Path) -> Path:
    """The folder itself, or the latest iteration inside a Megatron-LM one."""
    folder = path.expanduser()
    latest = folder / _LATEST
    if latest.is_file():
        text = latest.read_text(encoding="utf-8").strip()
        folder /= f"iter_{int(text):07d}" if text.isdecimal() else text
    with _damage_named(folder):
        found = dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    if not found:
        raise ConfigurationError(
            f"{folder}: must be a folder written by Megatron-Core's dist_checkpointing (it has metadata.json); "
            "check model.weights.path"
        )
    return folder


def _require_same_architecture(saved: Mapping[str, Any] | None, wanted: Architecture, folder: Path) -> None:
    if saved is None:
        return
    differing = [
        f"{name} {saved[name]!r} instead of {value!r}"
        for name, value in wanted.model_dump().items()
        if name in saved and saved[name] != value and name != "max_sequence_length"
    ]
    if differing:
        raise ConfigurationError(
            f"{folder}: must hold the model of the recipe, got {', '.join(differing)}; correct model.architecture"
        )
