"""slime: its custom loss, TIS and advantage functions, and the log-probability pass that feeds them.

slime looks functions up by path::

    --loss-type custom_loss --custom-loss-function-path megatron_support.adapters.slime.policy_loss
    --custom-megatron-init-path megatron_support.adapters.slime.init

Alignment: per-sample lists hold response tokens; a context-parallel rank holds those of its two zigzag chunks, chunk
by chunk. What slime does to the loss afterwards is undone by nothing here: a sum over this rank's samples (or tokens)
is what it expects.
"""

from __future__ import annotations

from argparse import Namespace

from megatron_support.adapters.hooks import Hook, HostAdapter
from megatron_support.adapters.slime.estimators import advantages
from megatron_support.adapters.slime.logprobs import LOSS_PATH, hook_logprobs, log_probs_and_entropy
from megatron_support.adapters.slime.loss import policy_loss, tis

__all__ = ["HOST", "LOSS_PATH", "advantages", "init", "log_probs_and_entropy", "policy_loss", "tis"]


def init(args: Namespace) -> None:
    """slime's ``--custom-megatron-init-path``: hook the log-probability pass of this training process."""
    from megatron_support.adapters.registry import register

    register("slime")


HOST = HostAdapter(
    name="slime",
    module="slime",
    distributions=("slime",),
    hooks=(Hook(what="log-probability pass", apply=hook_logprobs, needs=("slime.backends", "megatron.core")),),
    guide="examples/slime/README.md",
)
