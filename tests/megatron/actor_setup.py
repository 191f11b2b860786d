"""A tiny model, synthetic rollouts with tokens outside the support, and an actor step under any layout."""

from __future__ import annotations

import torch

from megatron_support.config.recipe import ActorStepConfig, ModelConfig, OptimizerSettings, ParallelConfig
from megatron_support.megatron.actor_step import ActorStep
from megatron_support.megatron.host import setup_host
from megatron_support.megatron.model import build_model, wrap_ddp
from megatron_support.megatron.optimizer import build_optimizer
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.megatron.reference import HostWeights
from megatron_support.rollouts.batch import RolloutBatch

VOCAB = 100

MODEL = {
    "architecture": {
        "vocab_size": VOCAB,
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "max_sequence_length": 64,
    },
    "dtype": "float32",
}

KL_GSPO = {
    "surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
    "ratio_level": "sequence",
    "kl": {"coef": 0.05, "type": "k3"},
}


def make_rollouts(groups: int = 3, samples: int = 4, seed: int = 0, length: tuple[int, int] = (5, 17)) -> RolloutBatch:
    """Random tokens under top-k 70 and top-p 0.9: a good part of them lie outside a random model's support."""
    g = torch.Generator().manual_seed(seed)
    count = groups * samples
    lengths = torch.randint(*length, (count,), generator=g)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu_seqlens[-1])
    position = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
    response = position >= 3
    generation = -1 - 3 * torch.rand(total, generator=g)
    return RolloutBatch(
        tokens=torch.randint(0, VOCAB, (total,), generator=g),
        cu_seqlens=cu_seqlens,
        response_mask=response,
        rewards=torch.rand(count, generator=g),
        sample_mask=torch.ones(count, dtype=torch.bool),
        group_ids=torch.arange(groups).repeat_interleave(samples),
        temperature=torch.ones(count),
        top_k=torch.full((count,), 70),
        top_p=torch.full((count,), 0.9),
        sample_ids=tuple(f"{i // samples}-{i % samples}" for i in range(count)),
        generation_logprobs=torch.where(response, generation, 0.0),
    )


def make_step(
    *,
    parallel: dict | None = None,
    loss: dict | None = None,
    microbatch: dict | None = None,
    optimizer: dict | None = None,
    per_token: bool = False,
    architecture: dict | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    transformer_impl: str = "auto",
    keep_current: bool = False,
    **step: object,
) -> ActorStep:
    """Host, groups, model, optimizer and reference for this rank; torch.distributed is up already."""
    setup_host(device)
    # a large eps: Adam divides a gradient that is all rounding by itself, which no layout could agree on
    settings = OptimizerSettings.from_dict({"lr": 1e-2, "eps": 1e-3, "clip_grad": 1.0, **(optimizer or {})})
    layout = ParallelConfig.from_dict(parallel or {})
    groups = initialize_parallel(layout)
    config = ModelConfig.from_dict(
        {
            "architecture": MODEL["architecture"] | (architecture or {}),
            "dtype": dtype,
            "transformer_impl": transformer_impl,
        }
    )
    model = wrap_ddp(
        build_model(config, layout, groups, seed=7, calculate_per_token_loss=per_token),
        distributed_optimizer=settings.distributed,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
    )
    built, scheduler = build_optimizer(settings, model.chunks, total_steps=10)
    step_config = ActorStepConfig.from_dict(
        {"loss": loss or KL_GSPO, "microbatch": microbatch or {"max_tokens": 64}, "minibatches": 2, **step}
    )
    reference = HostWeights(model.chunks)
    return ActorStep(
        model, built, scheduler, step_config, groups=groups, reference=reference, keep_current=keep_current
    )
