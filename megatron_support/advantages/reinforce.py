"""REINFORCE++ and on-policy distillation: per-token signals, whitened over the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_support.advantages.grpo import group_means
from megatron_support.advantages.tokens import GlobalSum, discounted_returns, response_tokens
from megatron_support.advantages.tokens import whiten as whiten_values


def reinforce_pp_advantages(
    rewards: Tensor,
    response_mask: Tensor,
    sequence_ids: Tensor,
    *,
    group_ids: Tensor | None = None,
    sample_mask: Tensor | None = None,
    token_penalty: Tensor | None = None,
    gamma: float = 1.0,
    whiten: bool = True,
    global_sum: GlobalSum | None = None,
) -> Tensor:
    """Return to go, whitened over all response tokens.

    Formula: ``A_t = whiten(sum_{s >= t} gamma^(s - t) r_s)``; r is the reward (minus the prompt's mean with
    ``group_ids``) at the last response token, minus the penalty of each token. Hu 2025, arXiv:2501.03262.

    Args:
        rewards: ``[S]``.
        response_mask: ``[N]``.
        sequence_ids: int64 ``[N]``; the tokens of one sequence are in order.
        group_ids: int64 ``[S]`` for the baseline variant; None for no baseline.
        sample_mask: bool ``[S]``; a False sequence enters no statistic and has advantage 0.
        token_penalty: ``[N]``, e.g. KL in reward; 0 at tokens that have none.
        gamma: discount.
        whiten: whiten the result.
        global_sum: see :func:`megatron_support.advantages.tokens.whiten`.

    Returns:
        ``[N]`` float32, 0 outside responses.
    """
    kept = torch.ones_like(rewards, dtype=torch.bool) if sample_mask is None else sample_mask != 0
    mask = (response_mask != 0) & kept[sequence_ids]
    values = torch.where(kept, rewards.double(), 0.0)
    if group_ids is not None:
        values = values - group_means(values, group_ids, kept)
    tokens = response_tokens(mask, sequence_ids, rewards.numel())
    token_rewards = tokens.place_at_end(values)
    if token_penalty is not None:
        token_rewards = token_rewards - tokens.rows(token_penalty)
    advantages = tokens.flat(discounted_returns(token_rewards, gamma))
    return (whiten_values(advantages, mask, global_sum=global_sum) if whiten else advantages).float()


def opd_advantages(
    prev_logprobs: Tensor,
    teacher_logprobs: Tensor,
    response_mask: Tensor,
    outside: Tensor,
    *,
    coef: float = 1.0,
    whiten: bool = False,
    global_sum: GlobalSum | None = None,
) -> Tensor:
    """On-policy distillation: the reverse KL to a teacher as a reward of each token.

    Formula: ``A_t = coef (log p_teacher - log p_prev)`` at response tokens in the support, 0 elsewhere.
    Agarwal et al. 2024, arXiv:2306.13649; Lu & Thinking Machines 2025.

    Args:
        prev_logprobs: the student's ``[N]``, unfiltered where available.
        teacher_logprobs: ``[N]``, unfiltered.
        response_mask: ``[N]``.
        outside: bool ``[N]``, tokens outside the student's support.
        coef: scale.
        whiten: whiten over the response tokens, before exclusion.
        global_sum: see :func:`megatron_support.advantages.tokens.whiten`.

    Returns:
        ``[N]`` float32.
    """
    mask = response_mask != 0
    gap = teacher_logprobs.double() - prev_logprobs.double()
    advantages = coef * torch.where(mask & ~outside, gap, 0.0)
    if whiten:
        advantages = torch.where(outside, 0.0, whiten_values(advantages, mask, global_sum=global_sum))
    return advantages.float()
