"""slime's options as a loss configuration, checked against what slime does itself."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_support.adapters.context import AdapterSettings, merged_loss, refuse_survivors
from megatron_support.config.loss import ActorLossConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError

KL_TYPES: dict[str, dict[str, Any]] = {
    "k1": {"type": "k1", "output_clamp": None},
    "k2": {"type": "k2", "output_clamp": None},
    "k3": {"type": "k3", "output_clamp": None},
    "low_var_kl": {"type": "k3", "output_clamp": 10.0},
}
"""By ``kl_loss_type``."""


def loss_config(args: Namespace, settings: AdapterSettings) -> ActorLossConfig:
    """slime's loss options as our configuration, checked against what slime divides by.

    Raises:
        ConfigurationError: an option has no counterpart, or the aggregation does not fit ``calculate_per_token_loss``.
    """
    if getattr(args, "use_unbiased_kl", False) and settings.loss is None:
        raise ConfigurationError(
            "use_unbiased_kl weights the KL term by current / previous and has no counterpart, got True; drop it, or "
            "set loss.kl.on_policy in the settings file, which weights by current / generation"
        )
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    clip = {"clip_low": float(args.eps_clip), "clip_high": float(high)}
    if args.advantage_estimator == "cispo":
        surrogate: dict[str, Any] = {"type": "cispo", **clip}
    else:
        surrogate = {"type": "ppo_clip", "dual_clip": args.eps_clip_c, **clip}
    described: dict[str, Any] = {
        "surrogate": surrogate,
        "ratio_level": "sequence" if args.advantage_estimator == "gspo" else "token",
        "aggregation": {"type": "token_mean" if args.calculate_per_token_loss else "sequence_mean"},
        "entropy_coef": float(args.entropy_coef),
    }
    if args.use_kl_loss and args.kl_loss_coef:
        described["kl"] = {"coef": float(args.kl_loss_coef), "input_clamp": None, **KL_TYPES[args.kl_loss_type]}
    if args.use_tis:
        described["correction"] = {"type": "tis", "low": float(args.tis_clip_low), "high": float(args.tis_clip)}
    if args.use_opsm:
        described["sequence_mask"] = {"type": "opsm", "threshold": float(args.opsm_delta)}
    config = merged_loss(settings, described)
    refuse_survivors(config, "slime")
    fits = "tokens" if args.calculate_per_token_loss else "sequences"
    if config.denominator != fits:
        raise ConfigurationError(
            f"loss.aggregation must divide by {fits} with calculate_per_token_loss={args.calculate_per_token_loss}, "
            f"which slime does itself, got {config.aggregation.type!r}; change one of them"
        )
    if config.positive_nll_coef > 0:
        raise ConfigurationError(
            f"loss.positive_nll_coef must be 0 in slime, whose batch carries no rewards, got {config.positive_nll_coef}"
        )
    return config


def refuse_allgather(args: Namespace, groups: ParallelGroups) -> None:
    """Raise where context-parallel ranks do not hold zigzag chunks."""
    if groups.context is not None and getattr(args, "allgather_cp", False):
        raise ConfigurationError(
            "allgather_cp must be off, got True: tokens are expected in zigzag chunks; turn it off"
        )
