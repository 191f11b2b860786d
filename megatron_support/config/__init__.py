"""Strict, frozen configuration: the actor loss, the recipe, and how YAML becomes one."""

from megatron_support.config.base import StrictModel
from megatron_support.config.load import load_recipe
from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.recipe import Recipe

__all__ = ["ActorLossConfig", "Recipe", "StrictModel", "load_recipe"]
