"""From a configuration and the columns of a batch to one advantage per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.advantages.gae import gae_advantages
from megatron_support.advantages.grpo import gdpo_advantages, grpo_advantages, rloo_advantages
from megatron_support.advantages.kl_in_reward import kl_in_reward, outside_support
from megatron_support.advantages.reinforce import opd_advantages, reinforce_pp_advantages
from megatron_support.advantages.tokens import GlobalSum, require_finite
from megatron_support.config.advantages import (
    Advantages,
    GAEConfig,
    GDPOConfig,
    GRPOConfig,
    KLInReward,
    OPDConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from megatron_support.errors import RolloutError


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The columns of one batch, as :func:`compute_advantages` describes them."""

    estimator: str
    rewards: Tensor
    group_ids: Tensor
    sequence_ids: Tensor
    mask: Tensor
    """bool ``[N]``, response tokens of sequences that count."""
    sample_mask: Tensor
    filtered: Tensor | bool
    columns: Mapping[str, Tensor | None]
    global_sum: GlobalSum | None

    def column(self, name: str) -> Tensor:
        return require_finite(name, self.columns[name], self.mask, self.sequence_ids, self.estimator)

    def previous(self) -> tuple[Tensor, Tensor]:
        """(log-probabilities for a KL or distillation term, tokens where that term is 0)."""
        filtered_logprobs = self.columns["prev_logprobs"]
        if filtered_logprobs is None:
            raise RolloutError(
                f"{self.estimator} advantages need the column prev_logprobs, got a batch without it; "
                "run the previous pass"
            )
        outside = outside_support(filtered_logprobs, self.mask, self.filtered, self.sequence_ids)
        if self.columns["prev_logprobs_unfiltered"] is None:
            return filtered_logprobs, outside
        return self.column("prev_logprobs_unfiltered"), outside

    def penalty(self, settings: KLInReward | None) -> Tensor | None:
        """KL in reward ``[N]``; None where it is off."""
        if settings is None:
            return None
        own, outside = self.previous()
        return kl_in_reward(
            own,
            self.column("reference_logprobs"),
            self.mask,
            outside,
            coef=settings.coef,
            kind=settings.type,
            input_clamp=settings.input_clamp,
            output_clamp=settings.output_clamp,
        )

    def to_tokens(self, per_sequence: Tensor) -> Tensor:
        return torch.where(self.mask, per_sequence[self.sequence_ids].float(), 0.0)


def compute_advantages(
    config: Advantages,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    sequence_ids: Tensor,
    sample_mask: Tensor | None = None,
    filtered: Tensor | bool = True,
    prev_logprobs: Tensor | None = None,
    prev_logprobs_unfiltered: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    reward_components: Tensor | None = None,
    global_sum: GlobalSum | None = None,
) -> Tensor:
    """Advantages of flat tokens.

    Args:
        config: which estimator.
        rewards, group_ids, sample_mask: ``[S]``.
        response_mask, sequence_ids: ``[N]``; the tokens of one sequence are in order.
        filtered: whether a previous log-probability of -inf means "outside the support": a bool, ``[S]`` or ``[N]``.
        prev_logprobs, prev_logprobs_unfiltered, reference_logprobs, teacher_logprobs, values: ``[N]``, for the
            estimators that read them. Unfiltered previous ones are taken where they are given.
        reward_components: ``[S, K]``, for gdpo.
        global_sum: sums a float64 vector over data-parallel ranks that hold different sequences; None where every
            rank holds all of them.

    Returns:
        float32 ``[N]``, 0 outside the responses of sequences that count.

    Raises:
        RolloutError: a column that the estimator reads is missing.
        LogprobFault: an entry of such a column is not finite.
    """
    kept = torch.ones_like(rewards, dtype=torch.bool) if sample_mask is None else sample_mask != 0
    mask = (response_mask != 0) & kept[sequence_ids]
    if isinstance(filtered, Tensor) and filtered.shape == rewards.shape and filtered.shape != mask.shape:
        filtered = filtered[sequence_ids]
    batch = _Batch(
        estimator=config.type,
        rewards=rewards,
        group_ids=group_ids,
        sequence_ids=sequence_ids,
        mask=mask,
        sample_mask=kept,
        filtered=filtered,
        columns={
            "prev_logprobs": prev_logprobs,
            "prev_logprobs_unfiltered": prev_logprobs_unfiltered,
            "reference_logprobs": reference_logprobs,
            "teacher_logprobs": teacher_logprobs,
            "values": values,
            "reward_components": reward_components,
        },
        global_sum=global_sum,
    )
    if isinstance(config, GRPOConfig | RLOOConfig):
        return _group_relative(config, batch)
    if isinstance(config, ReinforcePPConfig):
        return _reinforce_pp(config, batch)
    if isinstance(config, GAEConfig):
        return _gae(config, batch)
    return _opd(config, batch) if isinstance(config, OPDConfig) else _gdpo(config, batch)


def _group_relative(config: GRPOConfig | RLOOConfig, batch: _Batch) -> Tensor:
    """GRPO or RLOO on rewards less the sum of their tokens' penalties."""
    rewards, penalty = batch.rewards, batch.penalty(config.kl_in_reward)
    if penalty is not None:
        rewards = rewards.double()
        rewards = rewards - torch.zeros_like(rewards).index_add(0, batch.sequence_ids, penalty)
    if isinstance(config, RLOOConfig):
        return batch.to_tokens(rloo_advantages(rewards, batch.group_ids, sample_mask=batch.sample_mask))
    per_sequence = grpo_advantages(
        rewards,
        batch.group_ids,
        leave_one_out=config.leave_one_out,
        normalize_std=config.normalize_std,
        sample_mask=batch.sample_mask,
    )
    return batch.to_tokens(per_sequence)


def _reinforce_pp(config: ReinforcePPConfig, batch: _Batch) -> Tensor:
    return reinforce_pp_advantages(
        batch.rewards,
        batch.mask,
        batch.sequence_ids,
        group_ids=batch.group_ids if config.baseline else None,
        sample_mask=batch.sample_mask,
        token_penalty=batch.penalty(config.kl_in_reward),
        gamma=config.gamma,
        whiten=config.whiten,
        global_sum=batch.global_sum,
    )


def _gae(config: GAEConfig, batch: _Batch) -> Tensor:
    return gae_advantages(
        batch.rewards,
        batch.column("values"),
        batch.mask,
        batch.sequence_ids,
        sample_mask=batch.sample_mask,
        token_penalty=batch.penalty(config.kl_in_reward),
        gamma=config.gamma,
        lam=config.lam,
        length_adaptive_alpha=config.length_adaptive_alpha,
        whiten=config.whiten,
        global_sum=batch.global_sum,
    ).advantages


def _opd(config: OPDConfig, batch: _Batch) -> Tensor:
    own, outside = batch.previous()
    return opd_advantages(
        own,
        batch.column("teacher_logprobs"),
        batch.mask,
        outside,
        coef=config.coef,
        whiten=config.whiten,
        global_sum=batch.global_sum,
    )


def _gdpo(config: GDPOConfig, batch: _Batch) -> Tensor:
    components = batch.columns["reward_components"]
    if components is None:
        raise RolloutError(
            "gdpo advantages need the column reward_components, got a batch without it; add the column or use grpo"
        )
    per_sequence = gdpo_advantages(
        components,
        batch.group_ids,
        weights=config.weights,
        leave_one_out=config.leave_one_out,
        normalize_std=config.normalize_std,
        whiten=config.whiten,
        sample_mask=batch.sample_mask,
        global_sum=batch.global_sum,
    )
    return batch.to_tokens(per_sequence)
