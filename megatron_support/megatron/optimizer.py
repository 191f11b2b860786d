"""Recipe -> Megatron's optimizer and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from torch import nn

from megatron_support.config.recipe import OptimizerSettings
from megatron_support.errors import ConfigurationError


def build_optimizer(
    settings: OptimizerSettings, ddp_chunks: Sequence[nn.Module], total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam with decoupled weight decay (fused by Transformer Engine or Apex where one is importable), and its schedule.

    Weight decay leaves out biases and norms. With bf16 parameters the optimizer keeps fp32 main parameters.

    Learning rate of update k = 0, 1, ... with W warmup steps and D decay steps: ``lr (k + 1) / (W + 1)`` for k <= W,
    then ``lr`` (constant), or from ``lr`` down to ``min_lr`` at k = D (linear, cosine). Call ``scheduler.step(1)``
    after each update; it also sets each parameter group's weight decay.

    Args:
        settings: the recipe's.
        ddp_chunks: from :func:`megatron_support.megatron.wrap_ddp`, with the same ``distributed``.
        total_steps: updates of the whole run; the length of the decay unless the recipe gives one.

    Raises:
        ConfigurationError: the schedule is all warmup, or the chunks were wrapped for the other kind of optimizer.
    """
    chunks = list(ddp_chunks)
    _require_same_wrapping(settings, cast(DistributedDataParallel, chunks[0]).ddp_config)
    dtype = get_model_config(chunks[0]).params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        use_distributed_optimizer=settings.distributed,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    return optimizer, _build_scheduler(settings, optimizer, total_steps)


def _require_same_wrapping(settings: OptimizerSettings, wrapped: DistributedDataParallelConfig) -> None:
    for field, option, ddp_field in (
        ("distributed", "distributed_optimizer", "use_distributed_optimizer"),
        ("overlap_grad_reduce", "overlap_grad_reduce", "overlap_grad_reduce"),
        ("overlap_param_gather", "overlap_param_gather", "overlap_param_gather"),
    ):
        asked, have = getattr(settings, field), getattr(wrapped, ddp_field)
        if asked != have:
            raise ConfigurationError(
                f"optimizer.{field} is {asked} but the model was wrapped for {have}; "
                f"pass the same value to wrap_ddp({option}=...)"
            )


def adam_implementation() -> str:
    """The package whose Adam Megatron uses: transformer_engine, apex or torch."""
    return megatron_optimizer.Adam.__module__.partition(".")[0]


def _build_scheduler(
    settings: OptimizerSettings, optimizer: MegatronOptimizer, total_steps: int
) -> OptimizerParamScheduler:
    schedule = settings.schedule
    warmup = schedule.warmup_steps
    decay = schedule.decay_steps or total_steps
    if schedule.type == "constant":
        decay = max(decay, warmup + 1)  # not read, but the scheduler asserts it
    elif warmup >= decay:
        raise ConfigurationError(
            f"optimizer.schedule.warmup_steps must be below the {decay} steps of the {schedule.type} decay, "
            f"got {warmup}; lower it, or raise decay_steps or train.steps"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / (warmup + 1),
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=schedule.type,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
    )
