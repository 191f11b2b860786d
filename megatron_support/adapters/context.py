"""What every adapter needs besides its host: settings that travel by environment, this process's groups, metrics."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from megatron_support.config.base import StrictModel
from megatron_support.config.bounds import PositiveInt
from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.recipe import LogprobConfig, SamplingConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError, LogprobFault
from megatron_support.loss import describe_faults, find_faults
from megatron_support.metrics import Max, Mean, MetricSet, Min, Sum
from megatron_support.types import SamplingParams

SETTINGS_VARIABLE = "MEGATRON_SUPPORT_CONFIG"


class AdapterSettings(StrictModel):
    """What a host cannot say itself. Read from the YAML file that ``MEGATRON_SUPPORT_CONFIG`` names."""

    loss: ActorLossConfig | None = None
    """Replaces the loss that the host's own options describe."""
    sampling: SamplingConfig | None = None
    """The rollout engine's filter, for a host that does not tell its trainer."""
    vocab_size: PositiveInt | None = None
    """True vocabulary size, where the host pads it and does not say."""
    logprobs: LogprobConfig = LogprobConfig()


def load_settings() -> AdapterSettings:
    """The settings of this process; defaults where the environment names no file.

    Raises:
        ConfigurationError: the file cannot be read or breaks a rule.
    """
    path = os.environ.get(SETTINGS_VARIABLE)
    return _read(path) if path else AdapterSettings()


@functools.cache
def _read(path: str) -> AdapterSettings:
    try:
        tree = OmegaConf.load(io.StringIO(Path(path).read_text(encoding="utf-8")))
        data: Any = OmegaConf.to_container(tree, resolve=True)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigurationError(
            f"{SETTINGS_VARIABLE} must name a readable YAML file, got {path!r} ({error}); correct or unset it"
        ) from None
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: settings are a mapping of fields, got {data!r}; see examples/")
    return AdapterSettings.from_dict(data, source=path)


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The same as the type that log-probabilities take."""
    return SamplingParams(config.temperature, config.top_k, config.top_p)


def running_groups() -> ParallelGroups:
    """This rank's Megatron groups; a single process where Megatron has made none."""
    if not dist.is_initialized() or importlib.util.find_spec("megatron") is None:
        return ParallelGroups()
    from megatron_support.megatron.parallel import current_groups, parallel_state

    return current_groups() if parallel_state.model_parallel_is_initialized() else ParallelGroups()


def global_vocab_size(width: int, groups: ParallelGroups, *stated: int | None) -> int:
    """The first stated size that is not None, else all columns of all ranks (padding included)."""
    return next((size for size in stated if size is not None), width * groups.tensor_size)


def refuse_survivors(config: ActorLossConfig, host: str) -> None:
    """Raise where the loss asks for counts that a host divides by before they are known."""
    if config.normalization == "survivors" and config.denominator != "none":
        raise ConfigurationError(
            f"loss.normalization must be 'rollout' in {host}, whose divisor is fixed before the forward pass, got "
            "'survivors'; use rollout"
        )


def raise_faults(config: ActorLossConfig, **tensors: Any) -> None:
    """Raise where a log-probability that the loss reads must be finite and is not. Synchronises once.

    Args:
        config: the loss.
        tensors: as for :func:`megatron_support.actor_loss`.

    Raises:
        LogprobFault: naming tensor, token, value and rule. Host loops stop on an exception of any rank.
    """
    if int(find_faults(config, **tensors).total):
        raise LogprobFault("\n".join(map(str, describe_faults(config, **tensors))))


@dataclass(frozen=True)
class HostMetrics:
    """Metrics as numerators of sums that a host divides itself.

    ``tokens`` and ``sequences`` are divided by the host's global counts, ``counts`` by nothing; ``extrema`` are lowest
    or highest values. A metric with another denominator is not among them.
    """

    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    counts: dict[str, Tensor]
    extrema: dict[str, Tensor]


def host_metrics(metrics: MetricSet) -> HostMetrics:
    """Sort a loss's metrics by what divides them."""
    sorted_metrics = HostMetrics({}, {}, {}, {})
    for name, metric in metrics.items():
        if isinstance(metric, Mean) and metric.per in ("token", "sequence"):
            target = sorted_metrics.tokens if metric.per == "token" else sorted_metrics.sequences
            target[name] = _scalar(metric.total)
        elif isinstance(metric, Sum):
            sorted_metrics.counts[name] = _scalar(metric.total)
        elif isinstance(metric, Min | Max):
            sorted_metrics.extrema[name] = _scalar(metric.value)
    return sorted_metrics


def _scalar(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))


def merged_loss(settings: AdapterSettings, described: Mapping[str, Any]) -> ActorLossConfig:
    """The loss of the settings file, else the one that the host's options describe."""
    return settings.loss if settings.loss is not None else ActorLossConfig.from_dict(described, source="host options")
