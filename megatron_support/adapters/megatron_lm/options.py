"""What Megatron-LM's options say of the loss and of the rollouts."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron_support.adapters.context import (
    AdapterSettings,
    load_settings,
    merged_loss,
    running_groups,
    sampling_params,
)
from megatron_support.adapters.hooks import host_module
from megatron_support.config.loss import ActorLossConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process as Megatron-LM has set it up."""

    args: Namespace
    """From ``get_args``."""
    settings: AdapterSettings
    groups: ParallelGroups

    @classmethod
    def current(cls) -> Process:
        """Raises: ConfigurationError where the settings file breaks a rule."""
        args = host_module("megatron.training").get_args()
        return cls(args=args, settings=load_settings(), groups=running_groups())

    @property
    def divides_per_token(self) -> bool:
        """Whether Megatron divides gradients by a total of counts."""
        return bool(self.args.calculate_per_token_loss)


def loss_config(args: Namespace, settings: AdapterSettings) -> ActorLossConfig:
    """The loss of the settings file, else the one that Megatron-LM's ``--grpo-*`` options describe.

    Raises:
        ConfigurationError: the loss needs what Megatron-LM cannot give it.
    """
    described: dict[str, Any] = {
        "surrogate": {
            "type": "ppo_clip",
            "clip_low": float(args.grpo_clamp_eps_lower),
            "clip_high": float(args.grpo_clamp_eps_upper),
        },
        "entropy_coef": float(args.grpo_entropy_term_weight),
    }
    if args.grpo_kl_beta:
        unclamped = {"input_clamp": None, "output_clamp": None}
        described["kl"] = {"coef": float(args.grpo_kl_beta), "type": "k3", **unclamped}
    if args.rl_inference_logprobs_is_correction:
        high = args.rl_importance_sampling_truncation_coef
        described["correction"] = {"type": "full"} if high is None else {"type": "tis", "low": 0.0, "high": float(high)}
    config = merged_loss(settings, described)
    if config.positive_nll_coef > 0:
        raise ConfigurationError(
            f"loss.positive_nll_coef must be 0 in Megatron-LM, whose microbatches carry no rewards, got "
            f"{config.positive_nll_coef}; drop it"
        )
    if config.normalization == "survivors" and config.denominator != "none":
        if not args.calculate_per_token_loss:
            raise ConfigurationError(
                "loss.normalization must be rollout without --calculate-per-token-loss, got survivors: the count is "
                "known only after the last forward pass; pass that flag, or use rollout"
            )
        if config.kl is not None:
            raise ConfigurationError(
                "loss.kl must be null with loss.normalization survivors in Megatron-LM, which leaves the sum of KL "
                "terms undivided where no token survives; use rollout, or drop the KL term"
            )
    return config


def rollout_sampling(args: Namespace, settings: AdapterSettings) -> SamplingParams:
    """The rollouts' filter: of the settings file, else ``--rl-default-temperature``, ``-top-k`` and ``-top-p``."""
    if settings.sampling is not None:
        return sampling_params(settings.sampling)
    top_k, top_p = int(args.rl_default_top_k), float(args.rl_default_top_p)
    return SamplingParams(  # 0 and -1 are how Megatron-LM spells off
        float(args.rl_default_temperature), top_k if top_k > 0 else None, top_p if top_p > 0 else 1.0
    )
