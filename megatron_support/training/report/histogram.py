"""Counts between edges, for the page's script."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def histogram(values: Tensor, *, bins: int = 40, cut: float = 0.0) -> dict[str, Any] | None:
    """Counts in equal bins; None where there is no value.

    Args:
        values: finite numbers.
        bins: how many at most; integers get bins of whole width.
        cut: this share at either end is counted in the outermost bins, so that a few far values do not hide the rest.
    """
    if values.numel() == 0:
        return None
    whole = not values.is_floating_point()
    ordered = values.double().sort().values
    last = len(ordered) - 1
    low, high = float(ordered[int(cut * last)]), float(ordered[last - int(cut * last)])
    if whole:
        width = max(1, -(-int(high - low + 1) // bins))
        count = -(-int(high - low + 1) // width)
        edges = low - 0.5 + width * torch.arange(count + 1, dtype=torch.float64)
    elif high > low:
        edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    else:
        room = abs(low) * 0.05 or 0.5
        edges = torch.linspace(low - room, low + room, 2 * (bins // 2) + 2, dtype=torch.float64)  # in the middle of one
    inside = ordered.clamp(float(edges[0]), float(edges[-1]))
    places = (torch.bucketize(inside, edges, right=True) - 1).clamp(0, len(edges) - 2)
    return {"edges": edges.tolist(), "counts": torch.bincount(places, minlength=len(edges) - 1).tolist()}
