"""Megatron-LM: forward steps for ``pretrain`` and for ``train_rl.py``, and the log-probability pass before the latter.

A step is passed where Megatron-LM takes one::

    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)      # any data that has these columns
    pretrain(config, None, ModelType.encoder_or_decoder, rl_forward_step, ...)  # in train_rl.py

Alignment: ``tokens``, ``loss_mask`` and ``position_ids`` are ``[b, S]``; log-probabilities are ``[b, S - 1]``, where
entry t is about token t + 1. What is made of them is ``[b, S]`` in that order, with an entry at the end that no token
has.

What Megatron does to the loss: with ``--calculate-per-token-loss`` the step returns (sum, count, metrics) and Megatron
divides by the total of counts. Without, the step divides by that total, which it counts over the step's microbatches
beforehand, and returns (loss times the factor of :mod:`megatron_support.megatron.scaling`, metrics).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from megatron_support.adapters.context import load_settings
from megatron_support.adapters.hooks import Hook, HostAdapter, host_module
from megatron_support.adapters.megatron_lm.logprobs import RL_UTILS, hook_logprobs, is_hooked, read_rl_entry
from megatron_support.adapters.megatron_lm.microbatch import RlMicrobatch, rl_microbatch
from megatron_support.adapters.megatron_lm.options import rollout_sampling
from megatron_support.adapters.megatron_lm.step import ForwardStep
from megatron_support.errors import ConfigurationError

__all__ = ["HOST", "ForwardStep", "RlMicrobatch", "forward_step", "rl_forward_step", "rl_microbatch"]


def _read_columns(entry: Mapping[str, Any], args: Namespace, device: torch.device) -> RlMicrobatch:
    return rl_microbatch(entry, device=device)


def _read_rl(entry: Any, args: Namespace, device: torch.device) -> RlMicrobatch:
    if rollout_sampling(args, load_settings()).filters and not is_hooked():
        raise ConfigurationError(
            "megatron_lm must be registered where rollouts are filtered, got old log-probabilities without a filter; "
            "call megatron_support.register('megatron_lm') before pretrain"
        )
    state = host_module(RL_UTILS).get_rl_runtime_state()
    microbatch = read_rl_entry(entry, args, device, state.packing_context)
    state.increment_sequences(microbatch.num_sequences)
    return microbatch


forward_step = ForwardStep(_read_columns)
"""For ``pretrain`` with data whose batches are mappings of the columns of :func:`rl_microbatch`."""
rl_forward_step = ForwardStep(_read_rl)
"""For ``train_rl.py``, in place of its own ``forward_step``."""

HOST = HostAdapter(
    name="megatron_lm",
    module="megatron.training",
    distributions=("megatron-core",),
    hooks=(Hook(what="log-probability pass", apply=hook_logprobs, needs=(RL_UTILS,)),),
    guide="examples/megatron_lm/README.md",
)
