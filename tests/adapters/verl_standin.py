"""Rollouts in verl's tensors, and the actor options that the adapter reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LENGTH = 7


def actor_options(**changes: Any) -> SimpleNamespace:
    """verl's actor options with asymmetric clipping."""
    defaults: dict[str, Any] = {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
        "loss_scale_factor": None,
        "entropy_coeff": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
        "global_batch_info": {},
    }
    assert not set(changes) - set(defaults)
    return SimpleNamespace(**{**defaults, **changes})


def rows(count: int, *, excluding: bool = False, seed: int = 3) -> dict[str, Tensor]:
    """Float64 ``[count, LENGTH]``: responses of several lengths with holes, one row without a token.

    Args:
        count: rows.
        excluding: whether some tokens are outside the support.
        seed: of the generator.
    """
    g = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, LENGTH, generator=g, dtype=torch.float64) * (high - low) + low

    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (count, 1), generator=g)
    mask &= torch.rand(count, LENGTH, generator=g) < 0.9
    mask[0], mask[1] = True, False
    old = uniform(-2.5, -0.5)
    batch = {
        "old_log_prob": old,
        "log_prob": old + uniform(-0.4, 0.4),
        "advantages": uniform(-2.0, 2.0),
        "response_mask": mask,
    }
    if excluding:
        for name in ("old_log_prob", "log_prob"):
            batch[name][(torch.rand(count, LENGTH, generator=g) < 0.2)] = -torch.inf
    return batch


def counts(batch: dict[str, Tensor]) -> dict[str, int]:
    """verl's global counts of these rows; a row without a token is not a sequence here."""
    mask = batch["response_mask"]
    return {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(-1).sum())}
