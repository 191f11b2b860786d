"""Group-relative advantages: every sample is compared with the other samples of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    leave_one_out: bool = False,
    normalize_std: bool = True,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Reward minus the group's baseline, over the group's standard deviation.

    Formula: ``(r_i - mean(group)) / std(group)``, std unbiased. With ``leave_one_out`` mean and std are those of the
    group's other samples. Shao et al. 2024, arXiv:2402.03300; without the std: Liu et al. 2025, arXiv:2503.20783.
    A group of equal rewards gives 0 (or r_i - mean, where the others are equal and r_i is not); a lone sample gives 0.

    Args:
        rewards: ``[S]``.
        group_ids: int64 ``[S]``; samples of one prompt share an id, any values.
        leave_one_out: baseline and std of the other samples.
        normalize_std: divide by the standard deviation.
        sample_mask: bool ``[S]``; a False sample enters no baseline and has advantage 0. None for all.

    Returns:
        ``[S]``, in the rewards' dtype.
    """
    values = rewards.double()
    mask = torch.ones_like(values) if sample_mask is None else (sample_mask != 0).double()
    values = torch.where(mask > 0, values, 0.0)
    groups, index = torch.unique(group_ids, return_inverse=True)

    def per_group(terms: Tensor) -> Tensor:
        return values.new_zeros(groups.numel()).index_add(0, index, terms)[index]

    count = per_group(mask) - (mask if leave_one_out else 0)
    divisor = count.clamp(min=1)
    # Centred on the group's mean first, so that equal rewards have a variance of exactly 0 up to rounding of the mean.
    centred = torch.where(mask > 0, values - per_group(values) / per_group(mask).clamp(min=1), 0.0)
    total, squares = per_group(centred), per_group(centred.square())
    if leave_one_out:
        total, squares = total - centred, squares - centred.square()
    baseline = total / divisor
    advantage = centred - baseline
    if normalize_std:
        variance = (squares - count * baseline.square()).clamp(min=0) / (count - 1).clamp(min=1)
        # Rounding leaves a variance of about (1e-16 r)^2 in a group of equal rewards: that is no spread.
        scale = per_group(values.abs()) / per_group(mask).clamp(min=1)
        spread = variance.sqrt()
        advantage = torch.where(spread > 1e-7 * scale, advantage / torch.where(spread > 0, spread, 1.0), advantage)
    alone = per_group(mask) < 2
    return torch.where(alone | (mask == 0), 0.0, advantage).to(rewards.dtype)
