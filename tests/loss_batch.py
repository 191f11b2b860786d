"""Random loss inputs in float64, and the configurations that the laws are tested on."""

from __future__ import annotations

from typing import Any

import torch

from megatron_support.config import ActorLossConfig

INF = float("inf")

SURROGATES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}},
    "dual_clip": {"surrogate": {"type": "ppo_clip", "dual_clip": 1.5}},
    "gspo": {"ratio_level": "sequence", "aggregation": {"type": "sequence_mean"}},
    "gspo_token": {"ratio_level": "sequence_token", "aggregation": {"type": "sequence_mean"}},
    "cispo": {"surrogate": {"type": "cispo", "clip_low": 0.2, "clip_high": 0.28}},
    "reinforce": {"surrogate": {"type": "reinforce"}},
    "on_policy": {"surrogate": {"type": "on_policy"}},
    "sapo": {"surrogate": {"type": "sapo"}, "aggregation": {"type": "sequence_mean"}},
    "gmpo": {"surrogate": {"type": "gmpo"}},
    "dppo_tv": {"surrogate": {"type": "dppo_tv", "low": 0.05, "high": 0.06}},
    "dppo_kl": {"surrogate": {"type": "dppo_kl", "low": 0.01, "high": 0.012}},
    "dro": {"surrogate": {"type": "dro", "beta": 0.3}},
    "topr": {"surrogate": {"type": "topr"}},
}

TERMS: dict[str, dict[str, Any]] = {
    "kl_k1": {"kl": {"coef": 0.1, "type": "k1"}},
    "kl_k2": {"kl": {"coef": 0.1, "type": "k2"}},
    "kl_k3": {"kl": {"coef": 0.1, "type": "k3"}, "aggregation": {"type": "sequence_mean"}},
    "kl_abs": {"kl": {"coef": 0.1, "type": "abs"}},
    "kl_on_policy": {"kl": {"coef": 0.1, "on_policy": True}},
    "full": {"correction": {"type": "full"}},
    "full_sequence": {"correction": {"type": "full"}, "ratio_level": "sequence"},
    "tis": {"correction": {"type": "tis", "low": 0.9, "high": 1.1}},
    "icepop": {"correction": {"type": "icepop", "low": 0.9, "high": 1.1}},
    "icepop_sequence": {"correction": {"type": "icepop", "low": 0.8, "high": 1.2}, "ratio_level": "sequence_token"},
    "sequence_mask": {"correction": {"type": "sequence_mask", "low": 0.97, "high": 1.03}},
    "token_sum": {"aggregation": {"type": "token_sum"}},
    "sequence_mean_token_sum": {"aggregation": {"type": "sequence_mean_token_sum"}},
    "dr_grpo": {"aggregation": {"type": "dr_grpo", "max_length": 16}},
    "entropy": {"entropy_coef": 0.1, "aggregation": {"type": "sequence_mean"}},
    "positive_nll": {"positive_nll_coef": 0.2},
    "opsm": {"sequence_mask": {"type": "opsm", "threshold": 0.02}},
    "error_threshold": {"sequence_error_threshold": 1.08, "kl": {"coef": 0.1}},
}

VARIANTS: dict[str, dict[str, Any]] = SURROGATES | TERMS


def config(name: str, **changes: Any) -> ActorLossConfig:
    return ActorLossConfig.from_dict({**VARIANTS[name], **changes})


def random_batch(seed: int, *, rows: int = 4, length: int = 7) -> dict[str, Any]:
    """All inputs of the loss as rows, every log-probability finite; a masked row and a row without a response."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(rows, length, generator=g, dtype=torch.float64) * (high - low) + low

    curr = uniform(-2.5, -0.05)
    prev = (curr + uniform(-0.4, 0.4)).clamp(max=-0.01)
    mask = torch.rand(rows, length, generator=g) < 0.7
    mask[:, 1] = True
    mask[1] = False
    sample_mask = torch.ones(rows, dtype=torch.bool)
    sample_mask[2] = False
    unfiltered = (curr - uniform(0.0, 0.3)).clamp(max=-0.01)
    return {
        "curr_logprobs": curr,
        "prev_logprobs": prev,
        "generation_logprobs": (prev + uniform(-0.15, 0.15)).clamp(max=-0.005),
        "curr_logprobs_unfiltered": unfiltered,
        "reference_logprobs": (unfiltered + uniform(-0.5, 0.5)).clamp(max=-0.01),
        "entropy": uniform(0.1, 3.0),
        "advantages": uniform(-2.0, 2.0),
        "response_mask": mask,
        "sample_mask": sample_mask,
        "rewards": torch.tensor([1.0, 0.0, 1.0, -1.0] * rows, dtype=torch.float64)[:rows],
    }


def counts(batch: dict[str, Any]) -> dict[str, Any]:
    """The denominators of the whole batch, before exclusion."""
    valid = batch["response_mask"] & batch["sample_mask"][:, None]
    return {
        "global_valid_tokens": int(valid.sum()),
        "global_valid_sequences": int(valid.any(-1).sum()),
        "global_positive_tokens": int((valid & (batch["rewards"] > 0)[:, None]).sum()),
    }


GRADIENTS = ("curr_logprobs", "curr_logprobs_unfiltered", "entropy")


def with_gradients(batch: dict[str, Any]) -> dict[str, Any]:
    """The same batch with leaf tensors that ask for a gradient."""
    return {
        name: value.detach().clone().requires_grad_() if name in GRADIENTS else value for name, value in batch.items()
    }


def gradients(loss: torch.Tensor, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of the loss, 0 where it does not depend on a tensor."""
    leaves = [batch[name] for name in GRADIENTS]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for name, leaf, grad in zip(GRADIENTS, leaves, found, strict=True)
    }


def flat(batch: dict[str, Any], order: torch.Tensor) -> dict[str, Any]:
    """The batch as flat tokens in the given order, with sequence ids."""
    rows, length = batch["response_mask"].shape
    ids = torch.arange(rows).repeat_interleave(length)[order]
    per_sequence = ("sample_mask", "rewards")
    tokens = {name: value if name in per_sequence else value.reshape(-1)[order] for name, value in batch.items()}
    return {**tokens, "sequence_ids": ids}
