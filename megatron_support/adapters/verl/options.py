"""verl's actor options as a loss configuration, and what its engines divide by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_support.adapters.context import AdapterSettings, merged_loss, refuse_survivors, sampling_params
from megatron_support.config.loss import ActorLossConfig
from megatron_support.errors import ConfigurationError

LOSS_MODE = "policy_support"
"""Name of the policy loss in verl's registry."""

AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "dr_grpo",
    "seq-mean-token-mean": "sequence_mean",
}
"""By ``loss_agg_mode``."""

_K1: dict[str, Any] = {"type": "k1", "input_clamp": None, "output_clamp": None}
_K2: dict[str, Any] = {"type": "k2", "input_clamp": None, "output_clamp": None}
_K3: dict[str, Any] = {"type": "k3", "input_clamp": 20.0, "output_clamp": 10.0}
_KL_TYPES = {
    "kl": _K1,
    "k1": _K1,
    "abs": {"type": "abs", "input_clamp": None, "output_clamp": None},
    "mse": _K2,
    "k2": _K2,
    "low_var_kl": _K3,
    "k3": _K3,
}


@dataclass(frozen=True, kw_only=True)
class Divisors:
    """verl's ``global_batch_info``: what the sums of all ranks are divided by. None: this microbatch's own count."""

    tokens: int | None
    sequences: int | None
    data_size: int
    """verl multiplies a loss by it, because DDP and FSDP take the mean over data-parallel ranks."""


def divisors(info: Mapping[str, Any], kind: str) -> Divisors:
    """Read ``config.global_batch_info``.

    Args:
        info: the mapping.
        kind: ``ActorLossConfig.denominator``, the count that the loss is divided by.

    Raises:
        ConfigurationError: that count is missing and there are several data-parallel ranks.
    """
    tokens, sequences = info.get("batch_num_tokens"), info.get("global_batch_size")
    data_size = int(info.get("dp_size") or 1)
    missing = {"tokens": tokens, "sequences": sequences}.get(kind, 1) is None
    if data_size > 1 and missing:
        name = "batch_num_tokens" if kind == "tokens" else "global_batch_size"
        raise ConfigurationError(
            f"global_batch_info[{name!r}] must be set where dp_size is {data_size}, got None; verl's engines set it"
        )
    return Divisors(tokens=tokens, sequences=sequences, data_size=data_size)


def filters(settings: AdapterSettings) -> bool:
    """Whether the settings file says that rollouts are filtered, so that -inf means outside the support."""
    return settings.sampling is not None and sampling_params(settings.sampling).filters


def loss_config(
    config: Any, settings: AdapterSettings, *, loss_agg_mode: str, length: int, whole: bool
) -> ActorLossConfig:
    """verl's ``ActorConfig`` as our configuration.

    Args:
        config: verl's; ``clip_ratio*`` describe a clipped surrogate, KL and entropy options the other terms.
        settings: a loss in them replaces all of that.
        loss_agg_mode: verl's aggregation; the configuration's must be the same.
        length: columns of the response, the horizon of ``seq-mean-token-sum-norm`` without ``loss_scale_factor``.
        whole: whether KL and entropy terms are computed here. False: verl adds them to what is returned.

    Raises:
        ConfigurationError: an option has no counterpart.
    """
    if loss_agg_mode not in AGGREGATIONS:
        raise ConfigurationError(f"loss_agg_mode must be one of {', '.join(AGGREGATIONS)}, got {loss_agg_mode!r}")
    kind = AGGREGATIONS[loss_agg_mode]
    aggregation: dict[str, Any] = {"type": kind}
    if kind == "dr_grpo":
        scale = config.global_batch_info.get("loss_scale_factor") or getattr(config, "loss_scale_factor", None)
        aggregation["max_length"] = int(scale or length)
    low, high = (
        config.clip_ratio if bound is None else bound for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    surrogate = {"type": "ppo_clip", "clip_low": float(low), "clip_high": float(high)}
    described: dict[str, Any] = {
        "surrogate": {**surrogate, "dual_clip": float(config.clip_ratio_c)},
        "aggregation": aggregation,
    }
    if whole and settings.loss is None:
        described["entropy_coef"] = float(config.entropy_coeff)
        if config.use_kl_loss:
            described["kl"] = {"coef": float(config.kl_loss_coef), **_kl(config.kl_loss_type)}
    found = merged_loss(settings, described)
    refuse_survivors(found, "verl")
    if found.aggregation.type != kind:
        raise ConfigurationError(
            f"loss.aggregation must be {kind!r} with loss_agg_mode={loss_agg_mode!r}, got {found.aggregation.type!r}; "
            "change one of them"
        )
    if found.positive_nll_coef > 0:
        raise ConfigurationError(
            f"loss.positive_nll_coef must be 0 in verl, whose loss gets no rewards, got {found.positive_nll_coef}"
        )
    if not whole and (found.kl is not None or found.entropy_coef > 0):
        raise ConfigurationError(
            "loss.kl and loss.entropy_coef must be off where verl computes these terms itself; use verl's use_kl_loss "
            "and entropy_coeff"
        )
    return found


def _kl(name: str) -> dict[str, Any]:
    if name not in _KL_TYPES:
        raise ConfigurationError(f"kl_loss_type must be one of {', '.join(_KL_TYPES)}, got {name!r}")
    return _KL_TYPES[name]
