"""Estimators of a KL divergence from one sampled token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(log_ratio: Tensor, kind: KLType) -> Tensor:
    """Per-token estimate of KL(p || q), for tokens sampled from p.

    Formula, with l = log q - log p: ``k1`` -l; ``k2`` l^2 / 2; ``k3`` e^l - 1 - l; ``abs`` |l|.
    Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        return torch.expm1(log_ratio) - log_ratio
    return log_ratio.abs()
