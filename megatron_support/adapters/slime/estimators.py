"""slime's advantage estimators, with the KL term 0 outside the support."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import running_groups
from megatron_support.adapters.slime.options import KL_TYPES
from megatron_support.advantages import gae_advantages, kl_in_reward, outside_support, reinforce_pp_advantages
from megatron_support.errors import ConfigurationError


def advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """slime's ``--custom-advantage-function-path``: its estimators, with the KL term 0 outside the support.

    A token that the previous pass found outside the support keeps its reward and value terms. Fills ``advantages`` and
    ``returns`` per sample.

    Raises:
        ConfigurationError: an estimator that follows a sequence, under context parallelism.
    """
    groups = running_groups()
    previous = rollout_data.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
    like = previous or rollout_data.get("rollout_log_probs") or rollout_data["values"]
    sizes = [len(values) for values in like]
    device = like[0].device
    rewards = torch.as_tensor(rollout_data["rewards"], dtype=torch.float32, device=device)
    ids = torch.repeat_interleave(torch.arange(len(sizes), device=device), torch.tensor(sizes, device=device))
    estimator = args.advantage_estimator
    if estimator in ("grpo", "gspo", "cispo"):
        _store(rollout_data, rewards[ids], rewards[ids], sizes)
        return
    if groups.context is not None:
        raise ConfigurationError(
            f"advantage_estimator {estimator!r} follows whole sequences and needs context_parallel_size 1 here, got "
            f"{groups.context_size}; use grpo, gspo or cispo, or slime's own estimator"
        )
    mask = torch.cat(list(rollout_data["loss_masks"])).to(device)
    penalty = torch.zeros(len(ids), device=device)
    if args.kl_coef and previous:
        old = torch.cat(list(previous))
        outside = outside_support(old, mask != 0, True, ids)
        kind = KL_TYPES[args.kl_loss_type]
        reference = torch.cat(list(rollout_data["ref_log_probs"]))
        penalty = kl_in_reward(old, reference, mask != 0, outside, coef=args.kl_coef, kind=kind["type"]).float()
    if estimator == "reinforce_plus_plus":
        found = reinforce_pp_advantages(rewards, mask, ids, token_penalty=penalty, gamma=args.gamma, whiten=False)
        _store(rollout_data, found, found, sizes)
    elif estimator == "reinforce_plus_plus_baseline":
        found = rewards[ids] - penalty
        _store(rollout_data, found, found, sizes)
    else:
        gae = gae_advantages(
            rewards,
            torch.cat(list(rollout_data["values"])),
            mask,
            ids,
            token_penalty=penalty,
            gamma=args.gamma,
            lam=args.lambd,
            whiten=False,
        )
        _store(rollout_data, gae.advantages, gae.returns, sizes)


def _store(rollout_data: dict[str, Any], found: Tensor, returns: Tensor, sizes: Sequence[int]) -> None:
    rollout_data["advantages"] = list(found.split(list(sizes)))
    rollout_data["returns"] = list(returns.split(list(sizes)))
