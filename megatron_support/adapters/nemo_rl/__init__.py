"""NeMo-RL: a loss function for its protocol, and its log-probability pass with -inf kept. Megatron backend only.

Alignment: tensors of a batch are ``[B, S]`` and entry t is about token t; entry 0 is dropped. NeMo-RL divides logits by
the temperature before either function sees them.

What NeMo-RL does to the loss: it divides by the context-parallel size and cancels what Megatron's schedule does, with
``calculate_per_token_loss`` on and gradients summed over data- and context-parallel ranks: **net 1 / C** for a 2-tuple.
Its own loss is the same on all C ranks; ours is each rank's part, and is returned times C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_support.adapters.hooks import Hook, Hooks, HostAdapter, MissingSymbol, host_module, symbol
from megatron_support.adapters.nemo_rl.logprobs import post_process, without_excluded, without_kl_outside
from megatron_support.adapters.nemo_rl.loss import SupportLossFn
from megatron_support.adapters.nemo_rl.tokens import trained_sampling

__all__ = ["HOST", "SupportLossFn"]

_GRPO = "nemo_rl.algorithms.grpo"
_TRAIN = "nemo_rl.models.megatron.train"
_ESTIMATORS = {
    "ReinforcePlusPlusAdvantageEstimator": ("logprobs_policy", "logprobs_reference"),
    "GeneralizedAdvantageEstimator": ("logprobs", "reference_logprobs"),
    "OPDAdvantageEstimator": ("prev_logprobs", "teacher_logprobs"),
}
WORKER = "megatron_support.adapters.nemo_rl.worker.SupportPolicyWorker"
_WORKER_OF = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"


def _replace_wherever_imported(hooks: Hooks, module: str, name: str, value: Any) -> None:
    """Replace a name of a module, and of NeMo-RL's modules that have taken it from there."""
    original = symbol(module, name)
    host_module(module)
    for key, holder in list(sys.modules.items()):
        if key.partition(".")[0] == "nemo_rl" and holder is not None and vars(holder).get(name) is original:
            hooks.replace(holder, name, value)


def _hook_loss(hooks: Hooks) -> None:
    _replace_wherever_imported(hooks, _GRPO, "ClippedPGLossFn", SupportLossFn)


def _hook_driver(hooks: Hooks) -> None:
    name = "compute_and_apply_seq_logprob_error_masking"
    _replace_wherever_imported(hooks, _GRPO, name, without_excluded(symbol(_GRPO, name)))
    estimators = host_module("nemo_rl.algorithms.advantage_estimator")
    for name, (policy, other) in _ESTIMATORS.items():
        estimator = getattr(estimators, name, None)
        if estimator is None:
            raise MissingSymbol(f"{estimators.__name__}.{name} does not exist")
        method = without_kl_outside(vars(estimator)["compute_advantage"], policy, other)
        hooks.replace(estimator, "compute_advantage", method)


def _hook_workers(hooks: Hooks) -> None:
    """Megatron policy workers are started from a class whose import registers this host in their process."""
    policies = host_module("nemo_rl.models.policy.lm_policy")
    registry = symbol("nemo_rl.distributed.ray_actor_environment_registry", "ACTOR_ENVIRONMENT_REGISTRY")

    def resolve(fqn: str, *args: Any, **options: Any) -> str:
        chosen: str = original(fqn, *args, **options)
        return WORKER if chosen == _WORKER_OF else chosen

    original: Callable[..., str] = hooks.replace(policies, "resolve_policy_worker_cls", resolve)
    if _WORKER_OF not in registry:
        raise MissingSymbol(f"the actor environment of {_WORKER_OF} does not exist")
    hooks.insert(registry, WORKER, registry[_WORKER_OF], label="ACTOR_ENVIRONMENT_REGISTRY")


def _hook_logprobs(hooks: Hooks) -> None:
    processor = symbol(_TRAIN, "LogprobsPostProcessor")

    def call(self: Any, data_dict: Any, input_ids: Any, cu_seqlens_padded: Any) -> Any:
        return post_process(self, original, data_dict, input_ids, cu_seqlens_padded)

    original = hooks.replace(processor, "__call__", call)


def _hook_filter(hooks: Hooks) -> None:
    """The worker knows the rollouts' filter; the loss function comes from the driver without it."""
    processor = symbol(_TRAIN, "LossPostProcessor")

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if isinstance(self.loss_fn, SupportLossFn):
            self.loss_fn.sampling = trained_sampling(self.sampling_params)

    original = hooks.replace(processor, "__init__", init)


HOST = HostAdapter(
    name="nemo_rl",
    module="nemo_rl",
    distributions=("nemo-rl", "nemo_rl"),
    hooks=(
        Hook(what="policy loss", apply=_hook_loss, needs=(_GRPO,)),
        Hook(what="readers of previous log-probabilities", apply=_hook_driver, needs=(_GRPO,)),
        Hook(what="policy workers", apply=_hook_workers, needs=("nemo_rl.models.policy.lm_policy", "ray")),
        Hook(what="log-probability pass", apply=_hook_logprobs, needs=("megatron.core", _TRAIN)),
        Hook(what="filter of the loss", apply=_hook_filter, needs=("megatron.core", _TRAIN)),
    ),
    guide="examples/nemo_rl/README.md",
)
