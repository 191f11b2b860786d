"""Log-probabilities of a microbatch, and Megatron-LM's pass over the rollouts with -inf kept."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_support.adapters.context import global_vocab_size
from megatron_support.adapters.hooks import Hooks, host_module
from megatron_support.adapters.megatron_lm.microbatch import COLUMNS, RlMicrobatch, rl_microbatch, row_positions
from megatron_support.adapters.megatron_lm.options import Process, rollout_sampling
from megatron_support.support import support_logprobs
from megatron_support.types import SamplingParams, TokenLogprobs

RL_UTILS = "megatron.rl.rl_utils"


def microbatch_logprobs(
    process: Process,
    logits: Tensor,
    microbatch: RlMicrobatch,
    sampling: SamplingParams,
    *,
    entropy: bool = False,
    inplace_backward: bool = False,
) -> TokenLogprobs:
    """Log-probabilities ``[b, S]`` of the tokens after each; 0 where that is of no response.

    Args:
        process: whose shards they are.
        logits: ``[b, S, V/TP]``.
        microbatch: the tokens.
        sampling: the filter.
        entropy: whether to compute it.
        inplace_backward: whether the gradient may overwrite the logits.
    """
    settings, groups = process.settings, process.groups
    stated = (settings.vocab_size, getattr(process.args, "vocab_size", None))
    return support_logprobs(
        logits,
        torch.where(microbatch.response_mask, microbatch.targets, -1),
        sampling,
        vocab_size=global_vocab_size(logits.shape[-1], groups, *stated),
        tp_group=groups.tensor,
        entropy=entropy,
        ties=settings.logprobs.ties,
        chunk_size=settings.logprobs.chunk_size,
        inplace_backward=inplace_backward,
    )


def run_model(chunk: nn.Module, microbatch: RlMicrobatch) -> Tensor:
    """Logits ``[b, S, V/TP]`` on the last pipeline stage; elsewhere the activation for the next."""
    packed = {} if microbatch.packed is None else {"packed_seq_params": microbatch.packed}
    output: Tensor = chunk(microbatch.input_ids, microbatch.position_ids, None, **packed)
    return output


def attribute(chunk: nn.Module, name: str) -> Any:
    """An attribute of the model inside Megatron's wrappers."""
    return host_module("megatron.core.utils").get_attr_wrapped_model(chunk, name)


def device_of(chunk: nn.Module) -> torch.device:
    return next(chunk.parameters()).device


def read_rl_entry(entry: Any, args: Namespace, device: torch.device, packing_context: Any) -> RlMicrobatch:
    """What ``train_rl.py`` reads: seven tensors, or the index of a bin in the packing context."""
    spans = packed = None
    if packing_context is None:
        batch = dict(zip(COLUMNS, entry, strict=True))
    else:
        values = host_module(RL_UTILS).load_packed_data_by_index(
            entry[0].item(), packing_context, args.rl_inference_logprobs_is_correction
        )
        batch = dict(zip(COLUMNS, values[:7], strict=True))
        spans, packed = list(zip(values[7], values[8], strict=True)), values[10]
    if not args.rl_inference_logprobs_is_correction:
        batch["inference_logprobs"] = None  # zeros that stand for nothing
    return rl_microbatch(batch, device=device, spans=spans, packed=packed)


def compute_logprobs_batch(
    model: nn.Module,
    data_loader: Any,
    forward_backward_func: Callable[..., Any],
    packing_context: Any,
    trajs_batch_size: int,
    seq_length: int,
    logprobs_batch_size: int,
    decoder_seq_length: int | None,
    *rest: Any,
    filtered: bool,
    **unread: Any,
) -> Tensor:
    """Megatron-LM's log-probability pass in fp32, with -inf kept at tokens outside the support.

    Args:
        filtered: False for reference values, which are of the temperature alone.
        model, data_loader, forward_backward_func, packing_context, trajs_batch_size, seq_length, logprobs_batch_size,
            decoder_seq_length: as Megatron-LM passes them.
        rest, unread: not read.

    Returns:
        fp32 ``[trajs_batch_size, seq_length - 1]`` on the host, the same on every rank of a pipeline; 0 where a packed
        row has no response token.
    """
    process = Process.current()
    sampling = rollout_sampling(process.args, process.settings)
    if not filtered:
        sampling = SamplingParams(sampling.temperature)
    values = torch.zeros(trajs_batch_size, seq_length, dtype=torch.float32, device=device_of(model))
    step = partial(_logprob_step, process, sampling, packing_context)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            start, iterator = 0, iter(data_loader)
            for _ in range(len(data_loader)):
                found = forward_backward_func(
                    forward_step_func=step,
                    data_iterator=iterator,
                    model=model,
                    num_microbatches=1,
                    seq_length=seq_length,
                    micro_batch_size=logprobs_batch_size,
                    decoder_seq_length=decoder_seq_length,
                    forward_only=True,
                )
                for rows in found if process.groups.is_last_stage else ():
                    values[start : start + len(rows)] = rows
                    start += len(rows)
    finally:
        model.train(was_training)
    if process.groups.pipeline is not None:
        dist.broadcast(values, src=process.groups.last_stage_rank, group=process.groups.pipeline)
    return values[:, :-1].contiguous().cpu()


def _logprob_step(
    process: Process, sampling: SamplingParams, packing_context: Any, data_iterator: Iterator[Any], model: nn.Module
) -> tuple[Tensor, None]:
    """Forward step whose last stage gives ``[b, S]``, which Megatron collects where there is no loss function."""
    entry, device = next(data_iterator), device_of(model)
    if packing_context is None:
        tokens, positions = entry
        blank = {"loss_mask": torch.ones_like(tokens), "advantages": torch.zeros(len(tokens))}
        whole = rl_microbatch({"tokens": tokens, "position_ids": positions, **blank}, device=device)
    else:
        whole = read_rl_entry(entry, process.args, device, packing_context)
    groups = process.groups
    microbatch = whole.shard(groups)
    output = run_model(model, microbatch)
    if not attribute(model, "post_process"):
        return output, None
    found = microbatch_logprobs(process, output, microbatch, sampling).filtered
    if groups.context is None:
        return found, None
    values = found.new_zeros(whole.input_ids.shape)
    values[:, row_positions(values, groups)] = found
    dist.all_reduce(values, group=groups.context)  # one rank has each; 0 + -inf is -inf
    return values, None


def hook_logprobs(hooks: Hooks) -> None:
    """In Megatron-LM's preparation of an update the first pass is the old policy's, the second the reference's."""
    rl = host_module(RL_UTILS)
    passes: list[str] = []

    def prepare_data_for_update(*args: Any, **options: Any) -> Any:
        passes.clear()
        return prepare(*args, **options)

    def logprobs_of_pass(*args: Any, **options: Any) -> Tensor:
        passes.append("reference" if passes else "old")
        return compute_logprobs_batch(*args, filtered=passes[-1] == "old", **options)

    prepare = hooks.replace(rl, "prepare_data_for_update", prepare_data_for_update)
    hooks.replace(rl, "compute_logprobs_batch", logprobs_of_pass)


def is_hooked() -> bool:
    """Whether the log-probability pass of this process keeps -inf."""
    return bool(host_module(RL_UTILS).compute_logprobs_batch.__module__ == __name__)
