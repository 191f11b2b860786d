"""The support by a full float64 sort: slow, plain, and independent of the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Float64 results of the naive way."""

    scaled: Tensor
    """``[T, V]`` leaf: logits divided by the temperature in float32 (float64 for float64 logits)."""

    kept: Tensor
    """bool ``[T, V]``"""

    boundary_gap: Tensor
    """``[T, V]``: distance of the mass above each logit's tie group from the top-p need, relative to the row's mass."""

    filtered: Tensor
    unfiltered: Tensor
    entropy: Tensor


def reference(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor = 1.0,
    ties: str = "group",
) -> Reference:
    """Sort every row, keep top-k, then top-p on what is renormalised, and take log-softmaxes.

    Args:
        logits: ``[T, V]``.
        targets: int64 ``[T]``, all >= 0.
    """
    tokens, vocabulary = logits.shape
    wide = logits.dtype == torch.float64

    def column(value, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).reshape(-1, 1).expand(tokens, 1)

    scaled = logits.detach().to(torch.float64 if wide else torch.float32)
    scaled = (scaled / column(temperature, scaled.dtype)).double().requires_grad_()
    order = torch.sort(scaled.detach(), dim=-1, descending=True, stable=True)
    values, ids = order.values, order.indices
    position = torch.arange(vocabulary).expand(tokens, vocabulary)
    k = column(0 if top_k is None else top_k, torch.int64)
    k = torch.where((k > 0) & (k < vocabulary), k, vocabulary)
    if ties == "group":
        kept = values >= values.gather(1, k - 1)
    else:
        kept = position < k
    p = column(top_p, torch.float64)
    mass = torch.where(kept, (values - values[:, :1]).exp(), 0.0)
    before = mass.cumsum(-1) - mass
    if ties == "group":
        group = torch.searchsorted(-values, -values)
        before = before.gather(1, group)
    need = p * mass.sum(-1, keepdim=True)
    within = (before < need) | (p >= 1)
    within[:, 0] = True
    gap = (before - need).abs() / mass.sum(-1, keepdim=True)
    unsort = ids.argsort(-1)
    kept = (kept & within & (values > -math.inf)).gather(1, unsort)
    log_p = torch.log_softmax(scaled, -1)
    at = targets[:, None]
    filtered = torch.log_softmax(scaled.masked_fill(~kept, -math.inf), -1).gather(1, at).squeeze(1)
    safe = torch.where(scaled > -math.inf, log_p, 0.0)
    entropy = -(log_p.exp() * safe).sum(-1)
    return Reference(scaled, kept, gap.gather(1, unsort), filtered, log_p.gather(1, at).squeeze(1), entropy)


def gradient(found: Reference, targets: Tensor, temperature: float | Tensor, weights: tuple[Tensor, Tensor, Tensor]):
    """Float64 ``[T, V]`` gradient, with respect to the logits, of the weighted sum of the three outputs.

    A filtered log-probability outside the support takes no part.
    """
    inside = found.kept.gather(1, targets[:, None]).squeeze(1)
    terms = (torch.where(inside, found.filtered, 0.0), found.unfiltered, found.entropy)
    loss = sum((term * weight.double()).sum() for term, weight in zip(terms, weights, strict=True))
    (grad,) = torch.autograd.grad(loss, found.scaled, retain_graph=True)
    return grad / torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1)
