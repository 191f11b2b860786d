"""Advantage estimators: pure functions of rewards, masks and log-probabilities."""

from megatron_support.advantages.estimate import compute_advantages
from megatron_support.advantages.gae import GAEOutput, gae_advantages
from megatron_support.advantages.grpo import gdpo_advantages, grpo_advantages, rloo_advantages
from megatron_support.advantages.kl_in_reward import kl_in_reward, outside_support
from megatron_support.advantages.reinforce import opd_advantages, reinforce_pp_advantages
from megatron_support.advantages.tokens import whiten

__all__ = [
    "GAEOutput",
    "compute_advantages",
    "gae_advantages",
    "gdpo_advantages",
    "grpo_advantages",
    "kl_in_reward",
    "opd_advantages",
    "outside_support",
    "reinforce_pp_advantages",
    "rloo_advantages",
    "whiten",
]
