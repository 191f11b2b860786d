"""The last stage's output and its log-probabilities: from logits, or from hidden states without making all logits."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from megatron_support.config.recipe import LogprobConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.parts import ModelParts, call_chunk, gather_parameter, model_forward, unwrap
from megatron_support.metrics import MetricSet
from megatron_support.rollouts.batch import select_support
from megatron_support.support import compare_supports, fused_support_logprobs, support_logprobs
from megatron_support.types import SamplingParams, TokenBatch, TokenLogprobs

_AUTO_FUSED_BYTES = 256 << 20
_HAS_OUTPUT_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters


@dataclass(frozen=True, kw_only=True)
class StageOutput:
    """What a model chunk made of a microbatch."""

    tensor: Tensor
    """Activation for the next stage; on the last one logits ``[T, V/TP]``, or hidden states ``[s, b, H]``."""
    weight: Tensor | None = None
    """The output layer's ``[V/TP, H]``, where ``tensor`` is hidden states."""


def uses_fused_head(logprobs: LogprobConfig, model: ModelParts, groups: ParallelGroups, tokens: int) -> bool:
    """Whether microbatches of ``tokens`` tokens on this rank go without whole logits."""
    if logprobs.fused_head != "auto":
        return logprobs.fused_head
    width = model.padded_vocab_size // groups.tensor_size
    return tokens * width * model.config.params_dtype.itemsize > _AUTO_FUSED_BYTES


def run_chunk(chunk: nn.Module, batch: TokenBatch, *, fused: bool) -> StageOutput:
    """One microbatch through one model chunk, stopping before the output layer where it is fused."""
    bare = unwrap(chunk)
    if not fused or not bare.post_process:
        return StageOutput(tensor=model_forward(chunk, batch))
    weights: list[Tensor] = []
    if _HAS_OUTPUT_PROCESSOR:

        def keep_hidden(*, hidden_states: Tensor, output_layer: Any, output_weight: Any, **rest: Any) -> Tensor:
            weights.append(output_layer.weight if output_weight is None else output_weight)
            return hidden_states

        hidden = call_chunk(chunk, batch, output_processor=keep_hidden)
    else:
        with _skipped(bare.output_layer, weights):
            hidden = call_chunk(chunk, batch).transpose(0, 1)  # GPTModel returns [b, s, H]
    gather_parameter(chunk, weights[0])
    return StageOutput(tensor=hidden, weight=weights[0])


@contextlib.contextmanager
def _skipped(output_layer: Any, weights: list[Tensor]) -> Iterator[None]:
    """Let the output layer return its input for the length of a block, and note which weight it was called with."""

    def keep_hidden(hidden: Tensor, weight: Tensor | None = None, **rest: Any) -> tuple[Tensor, None]:
        weights.append(output_layer.weight if weight is None else weight)
        return hidden, None

    output_layer.forward = keep_hidden
    try:
        yield
    finally:
        del output_layer.forward


def batch_logprobs(
    output: StageOutput,
    batch: TokenBatch,
    *,
    model: ModelParts,
    groups: ParallelGroups,
    logprobs: LogprobConfig,
    entropy: bool = False,
    inplace_backward: bool = False,
) -> TokenLogprobs:
    """Log-probabilities of a microbatch's targets, flat ``[T]`` in predictor order.

    Args:
        output: of the last stage.
        batch: the microbatch.
        model, groups: whose shards they are.
        logprobs: chunking, ties, whether tokens outside responses are left out (their values are 0 then).
        entropy: whether to compute the entropy.
        inplace_backward: whether the gradient may overwrite the logits.
    """
    targets = torch.where(batch.response_mask, batch.targets, -1) if logprobs.response_only else batch.targets
    batch = replace(batch, targets=targets)
    options: dict[str, Any] = {
        "vocab_size": model.architecture.vocab_size,
        "tp_group": groups.tensor,
        "entropy": entropy,
        "ties": logprobs.ties,
        "chunk_size": logprobs.chunk_size,
    }
    if output.weight is None:
        return support_logprobs(
            output.tensor,
            targets,
            batch.sampling,
            support=batch.support,
            inplace_backward=inplace_backward,
            **options,
        )
    rows, columns = batch.input_ids.shape
    order = (
        None if rows == 1 else torch.arange(targets.numel(), device=targets.device).view(rows, columns).t().flatten()
    )
    targets, sampling, support = _ordered(batch, order)
    values = fused_support_logprobs(
        output.tensor,
        output.weight,
        targets.view(columns, rows),
        sampling,
        support=support,
        sequence_parallel=model.config.sequence_parallel,
        accumulate_main_grad=model.config.gradient_accumulation_fusion and torch.is_grad_enabled(),
        **options,
    )
    return _flat_by_row(values, order)


def support_metrics(
    output: StageOutput, batch: TokenBatch, *, model: ModelParts, groups: ParallelGroups, logprobs: LogprobConfig
) -> MetricSet:
    """How far replayed supports are from those of the trainer's own logits, over response tokens; see
    :func:`megatron_support.compare_supports`. Empty where nothing is replayed, or no logits are made (fused head).
    """
    if batch.support is None or output.weight is not None:
        return MetricSet()
    sampling, targets = batch.sampling, torch.where(batch.response_mask, batch.targets, -1)
    if not isinstance(sampling.top_p, Tensor):
        # per token, so that a microbatch without a filter compares as one with filters does
        sampling = replace(sampling, top_p=torch.full(targets.shape, sampling.top_p, device=targets.device))
    return compare_supports(
        output.tensor,
        targets,
        sampling,
        batch.support,
        vocab_size=model.architecture.vocab_size,
        tp_group=groups.tensor,
        ties=logprobs.ties,
    )


def _ordered(batch: TokenBatch, order: Tensor | None) -> tuple[Tensor, SamplingParams, Any]:
    """Targets, sampling and support in the order of hidden states, which is by position first."""
    if order is None:
        return batch.targets, batch.sampling, batch.support

    def take(value: Any) -> Any:
        return value[order] if isinstance(value, Tensor) else value

    sampling = SamplingParams(*(take(getattr(batch.sampling, name)) for name in ("temperature", "top_k", "top_p")))
    support = None if batch.support is None else select_support(batch.support, order)
    return batch.targets[order], sampling, support


def _flat_by_row(values: TokenLogprobs, order: Tensor | None) -> TokenLogprobs:
    """Back into predictor order."""

    def flat(value: Tensor) -> Tensor:
        value = value.flatten()
        return value if order is None else torch.empty_like(value).index_copy(0, order, value)

    return TokenLogprobs(
        filtered=flat(values.filtered),
        unfiltered=flat(values.unfiltered),
        entropy=None if values.entropy is None else flat(values.entropy),
        in_support=flat(values.in_support),
    )
