"""What NeMo-RL's ``loss_fn`` options say of the loss."""

from __future__ import annotations

from typing import Any

from megatron_support.adapters.context import AdapterSettings, merged_loss, refuse_survivors
from megatron_support.config.loss import ActorLossConfig
from megatron_support.errors import ConfigurationError

_CORRECTIONS = {None: "full", "tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}


def described_loss(cfg: Any) -> dict[str, Any]:
    """NeMo-RL's ``ClippedPGLossConfig`` as a mapping for :class:`ActorLossConfig`."""
    clip = {"clip_low": cfg.ratio_clip_min, "clip_high": cfg.ratio_clip_max}
    if cfg.force_on_policy_ratio:
        surrogate: dict[str, Any] = {"type": "on_policy"}
    elif cfg.disable_ppo_ratio:
        surrogate = {"type": "reinforce"}
    elif cfg.use_cispo:
        surrogate = {"type": "cispo", **clip}
    else:
        surrogate = {"type": "ppo_clip", **clip, "dual_clip": cfg.ratio_clip_c}
    described: dict[str, Any] = {
        "surrogate": surrogate,
        "ratio_level": "sequence" if cfg.sequence_level_importance_ratios else "token",
        "aggregation": {"type": "token_mean" if cfg.token_level_loss else "sequence_mean"},
        "positive_nll_coef": cfg.positive_example_nll_weight,
    }
    if cfg.reference_policy_kl_penalty and not cfg.use_kl_in_reward:
        described["kl"] = {
            "coef": cfg.reference_policy_kl_penalty,
            "type": cfg.reference_policy_kl_type,
            "on_policy": cfg.use_on_policy_kl_approximation,
            "input_clamp": cfg.kl_input_clamp_value,
            "output_clamp": cfg.kl_output_clamp_value,
        }
    if cfg.use_importance_sampling_correction:
        kind = cfg.truncated_importance_sampling_type
        described["correction"] = {"type": _CORRECTIONS[kind]}
        if kind is not None:
            low = cfg.truncated_importance_sampling_ratio_min
            described["correction"] |= {"low": low or 0.0, "high": cfg.truncated_importance_sampling_ratio}
    return described


def loss_config(cfg: Any, settings: AdapterSettings) -> ActorLossConfig:
    """The loss of the settings file, else the one that NeMo-RL's options describe.

    Raises:
        ConfigurationError: an option has no counterpart, or the loss needs what NeMo-RL does not reduce over ranks.
    """
    if settings.loss is None and cfg.disable_ppo_ratio and cfg.ratio_clip_c is not None:
        raise ConfigurationError(
            f"loss_fn.ratio_clip_c must be null with disable_ppo_ratio, got {cfg.ratio_clip_c}: there is no ratio to "
            "clip; drop one of them"
        )
    config = merged_loss(settings, described_loss(cfg))
    refuse_survivors(config, "NeMo-RL")
    if config.denominator == "none":
        raise ConfigurationError(
            "loss.aggregation must divide by tokens or sequences in NeMo-RL, got 'token_sum'; use token_mean"
        )
    if config.positive_nll_coef > 0:
        raise ConfigurationError(
            f"loss_fn.positive_example_nll_weight must be 0, got {config.positive_nll_coef}: NeMo-RL divides it by "
            "each microbatch's own count, which no global count replaces; set it to 0"
        )
    return config
