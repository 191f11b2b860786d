"""Megatron-Core: host, model, weights, optimizer, forward passes, loss function, actor step, checkpoints.

Public names are imported on first use. Importing this package prepares the import of ``megatron.core``.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_support.megatron.host import prepare_import

prepare_import()

_PUBLIC = {
    "Host": "host",
    "setup_host": "host",
    "running_host": "host",
    "initialize_parallel": "parallel",
    "validate_layout": "parallel",
    "ModelParts": "parts",
    "build_model": "model",
    "wrap_ddp": "model",
    "build_optimizer": "optimizer",
    "load_weights": "weights",
    "read_architecture": "weights",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "compute_logprobs": "forward",
    "RolloutLogprobs": "forward",
    "prepare_minibatch": "minibatch",
    "run_schedule": "schedule",
    "HostWeights": "reference",
    "StepResult": "actor_step",
    "MegatronActorLoss": "loss_function",
    "ActorStep": "actor_step",
    "Sampler": "generate",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
