"""verl: a policy loss in its registry, the actor loss of its workers, and its Megatron engine's log-probabilities.

verl imports modules by name; every process of a run reads::

    VERL_USE_EXTERNAL_MODULES=megatron_support.autoload
    MEGATRON_SUPPORT_HOSTS=verl
    actor_rollout_ref.actor.policy_loss.loss_mode=policy_support

Alignment: ``[B, R]``, one row a response, aligned with its tokens. What verl does to the loss: the engine multiplies by
the number of microbatches, which Megatron divides by; DDP averages over data-parallel ranks, which ``dp_size``
cancels. So the loss is (sum of this microbatch) / (global count) * dp_size, as its own losses are.
"""

from __future__ import annotations

from megatron_support.adapters.hooks import Hook, HostAdapter
from megatron_support.adapters.verl.engine import ENGINE, hook_logprobs, hook_reward_kl
from megatron_support.adapters.verl.loss import hook_actor_loss, hook_policy_loss, policy_loss
from megatron_support.adapters.verl.options import LOSS_MODE

__all__ = ["HOST", "LOSS_MODE", "policy_loss"]

HOST = HostAdapter(
    name="verl",
    module="verl",
    distributions=("verl",),
    hooks=(
        Hook(what="policy loss", apply=hook_policy_loss),
        Hook(what="KL in rewards", apply=hook_reward_kl),
        Hook(what="actor loss", apply=hook_actor_loss),
        Hook(what="log-probability pass", apply=hook_logprobs, needs=("megatron.core", ENGINE)),
    ),
    guide="examples/verl/README.md",
)
