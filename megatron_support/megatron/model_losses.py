"""Losses that a model adds to the gradient by itself, and what the actor step can do beside them."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_support.config.loss import ActorLossConfig
from megatron_support.errors import ConfigurationError


def has_auxiliary_losses(model: TransformerConfig) -> bool:
    """Whether routers of experts add load-balancing losses."""
    coefficient = model.moe_aux_loss_coeff
    balancing = any(coefficient) if isinstance(coefficient, list) else bool(coefficient)
    return bool(model.num_moe_experts) and (balancing or bool(model.moe_z_loss_coeff))


def counts_survivors(loss: ActorLossConfig) -> bool:
    """Whether the denominator of the loss is known only after the last forward pass."""
    return loss.normalization == "survivors" and loss.denominator != "none"


def counts_ahead(loss: ActorLossConfig) -> bool:
    """Whether survivors must be counted before the step: the positive-sample NLL has a count of its own, and gradients
    can be divided by one afterwards."""
    return loss.normalization == "survivors" and loss.positive_nll_coef > 0


def check_model(model: TransformerConfig) -> None:
    """Refuse multi-token prediction.

    Raises:
        ConfigurationError: the model has it.
    """
    if model.mtp_num_layers:
        raise ConfigurationError(
            f"mtp_num_layers must be null for an actor, got {model.mtp_num_layers}: multi-token prediction adds a loss "
            "over every token, of prompts and responses alike; build the model without it"
        )


def check_actor_loss(loss: ActorLossConfig, model: TransformerConfig) -> None:
    """Refuse a loss whose gradient cannot be scaled without scaling that of the model's own losses.

    Raises:
        ConfigurationError: ``normalization: survivors`` with auxiliary losses.
    """
    if counts_survivors(loss) and has_auxiliary_losses(model):
        raise ConfigurationError(
            "loss.normalization must be rollout for a model with auxiliary losses of experts (moe.aux_loss_coef, "
            "moe.z_loss_coef), got survivors: its count is known after the backward pass, and dividing all gradients "
            "by it would divide theirs; use rollout, or set both coefficients to 0"
        )
