"""Generalised advantage estimation along the response tokens of flat sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.advantages.tokens import GlobalSum, response_tokens
from megatron_support.advantages.tokens import whiten as whiten_values


@dataclass(frozen=True, kw_only=True)
class GAEOutput:
    """Flat ``[N]`` float32, 0 outside responses."""

    advantages: Tensor
    """Whitened where asked for."""
    returns: Tensor
    """Advantages before whitening plus values: the target of a value model."""


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    sequence_ids: Tensor,
    *,
    sample_mask: Tensor | None = None,
    token_penalty: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    length_adaptive_alpha: float | None = None,
    whiten: bool = True,
    global_sum: GlobalSum | None = None,
) -> GAEOutput:
    """GAE from the last response token backwards.

    Formula: ``d_t = r_t + gamma V_{t+1} - V_t``, ``A_t = d_t + gamma lam A_{t+1}``, V and A 0 after the last response
    token; t + 1 is the next response token. Schulman et al. 2016, arXiv:1506.02438. Length-adaptive:
    ``lam = 1 - 1 / (alpha length)``, Yue et al. 2025 (VAPO), arXiv:2504.05118.

    A token outside the support keeps its reward and value terms, and the recursion passes through it.

    Args:
        rewards: ``[S]``, given at the last response token.
        values: ``[N]``, finite at response tokens.
        response_mask: ``[N]``.
        sequence_ids: int64 ``[N]``; the tokens of one sequence are in order.
        sample_mask: bool ``[S]``; a False sequence enters no statistic and has advantage 0.
        token_penalty: ``[N]``, e.g. KL in reward; 0 at tokens that have none.
        gamma: discount.
        lam: decay of the estimate.
        length_adaptive_alpha: alpha; None for a fixed ``lam``.
        whiten: whiten advantages over the response tokens, before exclusion.
        global_sum: see :func:`megatron_support.advantages.tokens.whiten`.
    """
    kept = torch.ones_like(rewards, dtype=torch.bool) if sample_mask is None else sample_mask != 0
    mask = (response_mask != 0) & kept[sequence_ids]
    tokens = response_tokens(mask, sequence_ids, rewards.numel())
    token_rewards = tokens.place_at_end(rewards)
    if token_penalty is not None:
        token_rewards = token_rewards - tokens.rows(token_penalty)
    baseline = tokens.rows(values)
    decay = torch.full_like(rewards, lam, dtype=torch.float64)
    if length_adaptive_alpha is not None:
        decay = (1 - 1 / (length_adaptive_alpha * tokens.lengths.clamp(min=1))).clamp(min=0).double()
    longest = baseline.shape[1]
    inside = torch.arange(longest, device=values.device) < tokens.lengths.unsqueeze(1)
    padded = torch.zeros_like(baseline)
    running = torch.zeros_like(decay)
    following = torch.zeros_like(decay)
    for t in reversed(range(longest)):
        delta = token_rewards[:, t] + gamma * following - baseline[:, t]
        # Beyond a response's end everything is 0, so its recursion starts at its last token.
        running = torch.where(inside[:, t], delta + gamma * decay * running, 0.0)
        following = baseline[:, t]
        padded[:, t] = running
    plain = tokens.flat(padded)
    returns = tokens.flat(padded + baseline)
    advantages = whiten_values(plain, mask, global_sum=global_sum) if whiten else plain
    return GAEOutput(advantages=advantages.float(), returns=returns.float())
