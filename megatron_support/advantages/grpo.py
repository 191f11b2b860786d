"""Group-relative advantages: every sample is compared with the other samples of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_support.advantages.tokens import GlobalSum
from megatron_support.advantages.tokens import whiten as whiten_values
from megatron_support.errors import ConfigurationError


def group_means(values: Tensor, group_ids: Tensor, kept: Tensor) -> Tensor:
    """``[S]``: the mean over the kept samples of each sample's group; 0 where there is none."""
    groups, index = torch.unique(group_ids, return_inverse=True)
    totals = values.new_zeros(groups.numel()).index_add(0, index, torch.where(kept, values, 0.0))
    counts = values.new_zeros(groups.numel()).index_add(0, index, kept.to(values.dtype))
    return (totals / counts.clamp(min=1))[index]


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    leave_one_out: bool = False,
    normalize_std: bool = True,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Reward minus the group's baseline, over the group's standard deviation.

    Formula: ``(r_i - mean) / std``, std unbiased, over the group's samples, or with ``leave_one_out`` over its other
    samples. Shao et al. 2024, arXiv:2402.03300; without the std: Liu et al. 2025, arXiv:2503.20783. Where there is no
    spread (equal rewards, or one sample) the division is left out; a lone sample has advantage 0.

    Args:
        rewards: ``[S]``.
        group_ids: int64 ``[S]``; samples of one prompt share an id, any values.
        leave_one_out: baseline and std of the other samples.
        normalize_std: divide by the standard deviation.
        sample_mask: bool ``[S]``; a False sample enters no baseline and has advantage 0. None for all.

    Returns:
        ``[S]``, in the rewards' dtype.
    """
    kept = torch.ones_like(rewards, dtype=torch.bool) if sample_mask is None else sample_mask != 0
    groups, index = torch.unique(group_ids, return_inverse=True)

    def per_group(terms: Tensor) -> Tensor:
        return terms.new_zeros(groups.numel()).index_add(0, index, terms)[index]

    values = torch.where(kept, rewards.double(), 0.0)
    size = per_group(kept.double())
    # Centred on the group's mean first: the variance of equal rewards is then 0 up to the rounding of that mean.
    centred = torch.where(kept, values - per_group(values) / size.clamp(min=1), 0.0)
    total, squares, count = per_group(centred), per_group(centred.square()), size
    if leave_one_out:
        total, squares, count = total - centred, squares - centred.square(), size - kept.double()
    baseline = total / count.clamp(min=1)
    advantages = centred - baseline
    if normalize_std:
        variance = (squares - count * baseline.square()).clamp(min=0) / (count - 1).clamp(min=1)
        std = variance.sqrt()
        spread = std > 1e-7 * per_group(values.abs()) / size.clamp(min=1)
        advantages = torch.where(spread, advantages / torch.where(spread, std, 1.0), advantages)
    return torch.where(kept & (size > 1), advantages, 0.0).to(rewards.dtype)


def rloo_advantages(rewards: Tensor, group_ids: Tensor, *, sample_mask: Tensor | None = None) -> Tensor:
    """Reward minus the mean reward of the group's other samples.

    Formula: ``r_i - mean_{j != i} r_j``. Ahmadian et al. 2024, arXiv:2402.14740.

    Args and Returns: as :func:`grpo_advantages`.
    """
    return grpo_advantages(rewards, group_ids, leave_one_out=True, normalize_std=False, sample_mask=sample_mask)


def gdpo_advantages(
    reward_components: Tensor,
    group_ids: Tensor,
    *,
    weights: Sequence[float] | None = None,
    leave_one_out: bool = False,
    normalize_std: bool = True,
    whiten: bool = True,
    sample_mask: Tensor | None = None,
    global_sum: GlobalSum | None = None,
) -> Tensor:
    """Each reward component normalised in its group by itself, so that none drowns the others.

    Formula: ``whiten(sum_k w_k grpo(r_k))``, whitened over the samples of the batch. arXiv:2601.05242.

    Args:
        reward_components: ``[S, K]``.
        group_ids: int64 ``[S]``.
        weights: K numbers; None for ones.
        leave_one_out, normalize_std, sample_mask: as :func:`grpo_advantages`.
        whiten: whiten the sum.
        global_sum: see :func:`megatron_support.advantages.tokens.whiten`.

    Returns:
        ``[S]``, in the rewards' dtype.

    Raises:
        ConfigurationError: the number of weights is not K.
    """
    components = reward_components.shape[1]
    if weights is not None and len(weights) != components:
        raise ConfigurationError(
            f"weights must have one entry per reward component, {components}, got {len(weights)}; add or remove some"
        )
    kept = torch.ones(len(group_ids), dtype=torch.bool) if sample_mask is None else sample_mask != 0
    total = torch.zeros_like(reward_components[:, 0], dtype=torch.float64)
    for component, weight in zip(reward_components.unbind(1), weights or [1.0] * components, strict=True):
        total = total + weight * grpo_advantages(
            component.double(),
            group_ids,
            leave_one_out=leave_one_out,
            normalize_std=normalize_std,
            sample_mask=sample_mask,
        )
    if whiten:
        total = whiten_values(total, kept.to(total.device), global_sum=global_sum)
    return total.to(reward_components.dtype)
