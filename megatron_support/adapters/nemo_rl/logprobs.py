"""NeMo-RL's log-probability pass with -inf kept, and what reads it in the driver."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import load_settings, running_groups
from megatron_support.adapters.nemo_rl.tokens import local_rows, row_logprobs, trained_sampling


def post_process(
    processor: Any,
    original: Callable[..., Any],
    data_dict: Mapping[str, Any],
    input_ids: Tensor,
    cu_seqlens_padded: Any,
) -> Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]:
    """NeMo-RL's ``LogprobsPostProcessor.__call__``: log-probabilities ``[B, S]``, entry t about token t, -inf kept.

    Masked entries are 0. Without a filter (as for reference values) NeMo-RL's own runs.

    Args:
        processor: NeMo-RL's, of which the filter is read.
        original: what NeMo-RL would run.
        data_dict: ``input_ids`` and ``token_mask`` ``[B, S]``, ``sample_mask`` ``[B]``.
        input_ids: not read but by the original.
        cu_seqlens_padded: boundaries of packed sequences; None where a row is a sequence.
    """
    sampling = trained_sampling(processor.sampling_params)
    if not sampling.filters:
        return original(processor, data_dict=data_dict, input_ids=input_ids, cu_seqlens_padded=cu_seqlens_padded)
    tokens = data_dict["input_ids"]
    where = (data_dict["token_mask"] != 0) & (data_dict["sample_mask"] != 0)[:, None]

    def inner(output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        groups = running_groups()
        if cu_seqlens_padded is None:
            segments = torch.full((len(tokens),), output_tensor.shape[1] * groups.context_size)
        else:
            segments = cu_seqlens_padded.diff().to("cpu", torch.int64)
        rows = local_rows(segments, tokens.shape[1], groups).to(tokens.device)
        values = row_logprobs(
            output_tensor.flatten(0, 1),
            rows.targets(tokens, where),
            sampling,
            groups=groups,
            settings=load_settings(),
        )
        return output_tensor.new_zeros(()), {"logprobs": rows.put(values.filtered, tokens.shape, groups)}

    return inner


def without_excluded(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-RL's sequence-level error check over the tokens that are in the support; its sample mask is kept."""

    @functools.wraps(original)
    def check(train_data: Any, *args: Any, **options: Any) -> Any:
        token_mask, previous = train_data["token_mask"], train_data["prev_logprobs"]
        outside = torch.isneginf(previous)
        train_data["token_mask"] = torch.where(outside, torch.zeros_like(token_mask), token_mask)
        train_data["prev_logprobs"] = torch.where(outside, 0.0, previous)
        try:
            return original(train_data, *args, **options)
        finally:
            train_data["token_mask"], train_data["prev_logprobs"] = token_mask, previous

    return check


def without_kl_outside(original: Callable[..., Any], policy: str, other: str) -> Callable[..., Any]:
    """An advantage estimator's method whose KL or distillation term is 0 at tokens outside the support.

    Args:
        original: NeMo-RL's method.
        policy: its argument with the previous log-probabilities.
        other: its argument with those they are compared with.
    """

    @functools.wraps(original)
    def compute_advantage(*args: Any, **options: Any) -> Any:
        previous, reference = options.get(policy), options.get(other)
        if previous is not None and reference is not None:
            options[policy] = torch.where(torch.isneginf(previous), reference, previous)
        return original(*args, **options)

    return compute_advantage
