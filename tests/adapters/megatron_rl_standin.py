"""Stand-in for Megatron-LM's ``megatron.rl.rl_utils``, which no wheel ships: signatures and call order alone.

Checked by hand against NVIDIA/Megatron-LM at d98e8a64ddf34856e74b24714e3bedb2f5a39553.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset


class RuntimeState:
    def __init__(self) -> None:
        self.packing_context: Any = None
        self.sequences = 0

    def increment_sequences(self, count: int) -> None:
        self.sequences += count


def rl_utils() -> types.ModuleType:
    """The module, whose functions look each other up in it, as Megatron-LM's do."""
    module = types.ModuleType("megatron.rl.rl_utils")
    state = RuntimeState()

    def compute_logprobs_batch(
        model,
        data_loader,
        forward_backward_func,
        packing_context,
        trajs_batch_size,
        seq_length,
        logprobs_batch_size,
        decoder_seq_length,
        dtype,
        pp_group,
        is_correction,
        collect_non_loss_data=False,
    ):
        raise AssertionError("registration replaces this")

    def load_packed_data_by_index(bin_idx, packing_context, logprobs_is_correction):
        row, columns = slice(bin_idx, bin_idx + 1), packing_context["columns"]
        per_token = {name: columns[name][row] if name in columns else None for name in ("old_logprobs", "ref_logprobs")}
        return (
            columns["tokens"][row],
            packing_context["advantages"][bin_idx],
            per_token["old_logprobs"],
            columns["loss_mask"][row, 1:],
            columns["position_ids"][row],
            per_token["ref_logprobs"],
            columns["inference_logprobs"][row] if logprobs_is_correction else None,
            packing_context["starts"][bin_idx],
            packing_context["lengths"][bin_idx],
            packing_context["indices"][bin_idx],
            packing_context["params"][bin_idx],
        )

    def prepare_data_for_update(model, columns, packing_context, micro_batch_size, forward_backward_func):
        """The two log-probability passes alone: old, then reference."""
        if packing_context is None:
            data = TensorDataset(columns["tokens"], columns["position_ids"])
            loader = DataLoader(data, batch_size=micro_batch_size)
        else:
            micro_batch_size = 1
            loader = DataLoader(TensorDataset(torch.arange(len(columns["tokens"]))), batch_size=1)
        passes = [
            module.compute_logprobs_batch(
                model=model,
                data_loader=loader,
                forward_backward_func=forward_backward_func,
                packing_context=packing_context,
                trajs_batch_size=len(columns["tokens"]),
                seq_length=columns["tokens"].shape[1],
                logprobs_batch_size=micro_batch_size,
                decoder_seq_length=None,
                dtype=torch.float32,
                pp_group=None,
                is_correction=True,
            )
            for _ in range(2)
        ]
        return passes

    module.get_rl_runtime_state = lambda: state
    module.compute_logprobs_batch = compute_logprobs_batch
    module.load_packed_data_by_index = load_packed_data_by_index
    module.prepare_data_for_update = prepare_data_for_update
    return module


def installed(modules: dict[str, Any]) -> types.ModuleType:
    """Put the stand-in among imported modules and return it."""
    package = types.ModuleType("megatron.rl")
    package.__path__ = []
    module = rl_utils()
    package.rl_utils = module
    modules.update({"megatron.rl": package, "megatron.rl.rl_utils": module})
    return module
