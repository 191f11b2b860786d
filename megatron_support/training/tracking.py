"""Weights & Biases, where a recipe asks for it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_support.config.recipe import Recipe
from megatron_support.errors import ConfigurationError


def check_wandb(recipe: Recipe) -> None:
    """Whether what ``logging.wandb`` asks for can be had, before a model is built.

    Raises:
        ConfigurationError: the package is missing.
    """
    if recipe.logging.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigurationError(
            "logging.wandb must be null without the package wandb, got a project; "
            "pip install 'megatron-support[wandb]', or remove it"
        )


class WandbRun:
    """One run there; on the first rank alone.

    Args:
        recipe: with ``logging.wandb``.
        folder: the run folder, which gives the run its name.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        config = recipe.logging.wandb
        assert config is not None
        self._run: Any = importlib.import_module("wandb").init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            name=folder.name,
            id=folder.name,
            resume="allow",  # a continued run goes on there
            dir=str(folder),
            config=recipe.model_dump(mode="json"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
