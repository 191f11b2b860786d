"""Corrections of Megatron-Core itself, whatever the device.

* ``WrappedTorchNorm`` refuses sequence parallelism. A norm over a sequence shard is right as long as its parameters are
  tagged, so that ``finalize_model_grads`` sums their gradients over the tensor-parallel group. The tag is added.
* ``DistributedOptimizer`` cannot save or load the per-parameter ``step`` of torch's own AdamW, which is what it wraps
  where neither Transformer Engine nor Apex is there. ``step`` is left out of sharded state and kept over a load.
* The router of experts in 0.16 asks whether ``te_general_gemm`` is None, and without Transformer Engine the name does
  not exist. It becomes None.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron_support.megatron.patches import Patches


def correct_megatron(patches: Patches) -> None:
    """Put them in place."""
    _allow_sequence_parallel_norm(patches)
    _checkpoint_adam_step(patches)
    _let_router_work_without_transformer_engine(patches)


def _let_router_work_without_transformer_engine(patches: Patches) -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        patches.set(moe_utils, "te_general_gemm", None)


def _allow_sequence_parallel_norm(patches: Patches) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        without = copy.copy(config)
        without.sequence_parallel = False
        module = original(cls, without, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    patches.set(WrappedTorchNorm, "__new__", new)


def _checkpoint_adam_step(patches: Patches) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    get = DistributedOptimizer._get_main_param_and_optimizer_states
    put = DistributedOptimizer._set_main_param_and_optimizer_states
    state_dict = DistributedOptimizer.state_dict
    load_state_dict = DistributedOptimizer.load_state_dict

    def get_without_step(self: Any, parameter: Any) -> dict[str, Any]:
        return {name: value for name, value in get(self, parameter).items() if name != "step"}

    @torch.no_grad()
    def put_beside_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, index = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        step = state.pop("step", None)
        put(self, parameter, tensors)
        if step is not None:
            state["step"] = step

    def state_dict_of_started(self: Any) -> dict[str, Any]:
        _start_adam(self.optimizer)
        return state_dict(self)

    def load_with_own_steps(self: Any, state: dict[str, Any]) -> None:
        load_state_dict(self, state)
        # it hands every parameter the same step tensor, which then counts one update per parameter
        for values in self.optimizer.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"] = values["step"].clone()

    patches.set(DistributedOptimizer, "_get_main_param_and_optimizer_states", get_without_step)
    patches.set(DistributedOptimizer, "_set_main_param_and_optimizer_states", put_beside_step)
    patches.set(DistributedOptimizer, "state_dict", state_dict_of_started)
    patches.set(DistributedOptimizer, "load_state_dict", load_with_own_steps)


def _start_adam(optimizer: Any) -> None:
    """Give a fresh torch AdamW the zero state that its first step would make. Fused Adams keep ``step`` per group."""
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter].update(
                    step=torch.zeros(()), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
                )
