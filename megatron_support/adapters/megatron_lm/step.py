"""The forward step and its loss function."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import raise_faults
from megatron_support.adapters.hooks import host_module
from megatron_support.adapters.megatron_lm.logprobs import attribute, device_of, microbatch_logprobs, run_model
from megatron_support.adapters.megatron_lm.microbatch import RlMicrobatch
from megatron_support.adapters.megatron_lm.options import Process, loss_config, rollout_sampling
from megatron_support.config.loss import ActorLossConfig
from megatron_support.distributed.counts import global_counts
from megatron_support.distributed.sequence_sum import sum_over_group
from megatron_support.errors import ConfigurationError
from megatron_support.loss import actor_loss
from megatron_support.metrics import Mean, MetricSet, Sum
from megatron_support.types import LossOutput


class ForwardStep:
    """A ``forward_step_func`` for Megatron-LM.

    Args:
        read: one entry of the data iterator as a microbatch; gets the entry, Megatron-LM's args and the model's device.
    """

    def __init__(self, read: Callable[[Any, Namespace, torch.device], RlMicrobatch]) -> None:
        self._read = read
        self._ahead: deque[RlMicrobatch] = deque()
        self._total = torch.zeros(2, dtype=torch.int64)

    def __call__(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., tuple[Any, ...]]]:
        """One microbatch through one model chunk.

        Raises:
            ConfigurationError: the options do not describe a loss, or the model adds losses that cannot go beside it.
        """
        chunk = model[0] if isinstance(model, list) else model
        process = Process.current()
        check_model_losses(attribute(chunk, "config"), process)
        device = device_of(chunk)

        def read() -> RlMicrobatch:
            return self._read(next(data_iterator), process.args, device)

        total = None
        if attribute(chunk, "post_process") and torch.is_grad_enabled() and not process.divides_per_token:
            if not self._ahead:
                self._look_ahead(read, process)
            microbatch, total = self._ahead.popleft(), self._total
        else:
            microbatch = read()
        microbatch = microbatch.shard(process.groups)
        return run_model(chunk, microbatch), partial(loss_func, process, microbatch, total)

    def _look_ahead(self, read: Callable[[], RlMicrobatch], process: Process) -> None:
        """Take all microbatches that the schedule will ask for in this step, and count them over all ranks."""
        self._ahead.extend(read() for _ in range(_num_microbatches()))
        own = torch.stack([microbatch.counts() for microbatch in self._ahead]).sum(0)
        self._total = global_counts(own, process.groups.data)


def loss_func(process: Process, microbatch: RlMicrobatch, total: Tensor | None, logits: Tensor) -> tuple[Any, ...]:
    """Megatron's ``loss_func`` for the last stage.

    Args:
        process, microbatch: what the forward pass saw.
        total: int64 ``[2]``, response tokens and sequences of the step over all ranks; None where Megatron divides.
        logits: ``[b, S, V/TP]``.

    Returns:
        ``(sum, count, metrics)`` or ``(loss, metrics)``, by ``calculate_per_token_loss``. A metric is a numerator and
        what divides it, which Megatron-LM sums over microbatches and ranks before it divides.

    Raises:
        LogprobFault: a log-probability must be finite and is not.
    """
    groups = process.groups
    config = loss_config(process.args, process.settings)
    sampling = rollout_sampling(process.args, process.settings)
    values = microbatch_logprobs(
        process, logits, microbatch, sampling, entropy=config.entropy_coef > 0, inplace_backward=True
    )
    tensors: dict[str, Any] = {
        "curr_logprobs": values.filtered.flatten(),
        "curr_logprobs_unfiltered": values.unfiltered.flatten(),
        "entropy": None if values.entropy is None else values.entropy.flatten(),
        "response_mask": microbatch.response_mask.flatten(),
        "sequence_ids": microbatch.sequence_ids.flatten(),
        "sample_mask": logits.new_ones(microbatch.num_sequences, dtype=torch.bool),
        "filtered": sampling.filters,
        **{name: column.flatten() for name, column in microbatch.columns.items()},
    }
    raise_faults(config, **tensors)
    output = actor_loss(
        config,
        **tensors,
        global_valid_tokens=1,
        global_valid_sequences=1,
        sequence_sum=None if groups.context is None else partial(sum_over_group, group=groups.context),
        counts_sequences=None if groups.context is None else groups.context_rank == 0,
    )
    count = _divisor(config, output)
    shards = _num_microbatches() * groups.data_context_size
    whole = output.loss.new_ones(()) / shards if count is None else count.to(output.loss.dtype)
    metrics = two_element_metrics(output.metrics, shards)
    metrics["lm loss"] = torch.stack([output.loss.detach(), whole])
    if process.divides_per_token and count is not None:
        return output.loss.clone(), count.to(torch.int), metrics
    loss = output.loss * _loss_factor(process)
    if count is not None and total is not None:
        loss = loss / total[0 if config.denominator == "tokens" else 1].clamp(min=1)
    return loss, metrics


def two_element_metrics(metrics: MetricSet, shards: int) -> dict[str, Tensor]:
    """Metrics in Megatron-LM's form: fp64 ``[2]``, of which sums over ``shards`` losses are divided by each other.

    A count is divided by 1. Extrema are no quotient of sums and are left out.
    """
    result: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Mean | Sum):
            (numerator, *rest), _ = metric.parts()
            denominator = rest[0] if rest else torch.ones_like(numerator) / shards
            result[name] = torch.stack([numerator, denominator.to(numerator.device)])
    return result


def _divisor(config: ActorLossConfig, output: LossOutput) -> Tensor | None:
    """This microbatch's part of the count that divides the loss; None for a plain sum."""
    survivors = config.normalization == "survivors"
    if config.denominator == "none":
        return None
    if config.denominator == "tokens":
        return output.surviving_tokens if survivors else output.valid_tokens
    return output.surviving_sequences if survivors else output.valid_sequences


def _loss_factor(process: Process) -> float:
    from megatron_support.megatron.scaling import loss_factor

    return loss_factor(
        calculate_per_token_loss=process.divides_per_token,
        num_microbatches=_num_microbatches(),
        data_parallel_size=process.groups.data_size,
        context_parallel_size=process.groups.context_size,
    )


def check_model_losses(config: Any, process: Process) -> None:
    """Refuse a model that adds losses which cannot go beside the actor's.

    Raises:
        ConfigurationError: multi-token prediction; auxiliary losses of experts where Megatron divides by tokens.
    """
    from megatron_support.megatron.model_losses import check_model, has_auxiliary_losses

    check_model(config)
    if process.divides_per_token and has_auxiliary_losses(config):
        raise ConfigurationError(
            "calculate_per_token_loss must be off for a model with auxiliary losses of experts, got True: Megatron "
            "would divide those by response tokens alone; drop --calculate-per-token-loss"
        )


def _num_microbatches() -> int:
    return int(host_module("megatron.core.num_microbatches_calculator").get_num_microbatches())
