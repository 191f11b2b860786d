"""Advantage estimators: pure functions of rewards, masks and log-probabilities."""

from megatron_support.advantages.grpo import grpo_advantages

__all__ = ["grpo_advantages"]
