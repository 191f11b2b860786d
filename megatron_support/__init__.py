"""Support-aware log-probabilities and actor losses for reinforcement learning on Megatron-Core.

Public names are imported on first use, so ``import megatron_support`` costs nothing beyond torch and needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "SamplingParams": "types",
    "TokenLogprobs": "types",
    "RolloutSupport": "types",
    "TokenBatch": "types",
    "LossOutput": "types",
    "MetricSet": "metrics",
    "support_logprobs": "support",
    "fused_support_logprobs": "support",
    "token_logprobs": "support",
    "previous_logprobs": "support",
    "compare_supports": "support",
    "actor_loss": "loss",
    "ActorLossConfig": "config",
    "register_surrogate": "loss",
    "sequence_logprob_errors": "rollouts",
    "filter_sequences": "rollouts",
    "grpo_advantages": "advantages",
    "rloo_advantages": "advantages",
    "reinforce_pp_advantages": "advantages",
    "gae_advantages": "advantages",
    "opd_advantages": "advantages",
    "register": "adapters",
    "unregister": "adapters",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
