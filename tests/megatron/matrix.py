"""What every layout of the matrix runs on a rank, and how it is compared with one process."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_support.config.recipe import ActorStepConfig
from megatron_support.megatron.actor_step import ActorStep
from megatron_support.megatron.faults import LeftOut
from megatron_support.rollouts.batch import RolloutBatch
from tests.megatron.actor_setup import KL_GSPO, make_rollouts, make_step
from tests.megatron.layouts import Layout
from tests.megatron.tiny import parameter_gradients, shard_of, whole_logits
from tests.support_reference import reference

LOSSES: dict[str, dict[str, Any]] = {
    "token": {"kl": {"coef": 0.05, "type": "k2"}, "entropy_coef": 0.01, "correction": {"type": "tis", "high": 2.0}},
    "gspo": KL_GSPO | {"aggregation": {"type": "sequence_mean"}},
    "sequence_mean": {
        "aggregation": {"type": "sequence_mean"},
        "kl": {"coef": 0.05, "on_policy": True},
        "correction": {"type": "icepop", "low": 0.02, "high": 5.0},
        "min_support_fraction": 0.3,
    },
}
NORMALIZATIONS = ("rollout", "survivors")
PACKINGS = ("packed", "padded")

STILL = {"lr": 1e-30, "clip_grad": 0.0}
"""An optimizer that runs and moves no weight, so that one model serves every loss."""

TOLERANCE = 2e-6
"""Of a parameter's gradient, relative to the largest entry of that tensor's gradient in one process (fp32)."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """One actor step on one rank."""

    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    previous: Tensor
    tensor_rank: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One actor step on one rank beside the same step in one process."""

    worst: float
    """Largest difference of a gradient, relative to the largest entry of that tensor's gradient in one process."""
    where: str
    seen: frozenset[str]
    """Parameters this rank has."""
    metrics: dict[str, float]
    logprobs: float
    """Largest difference of a finite previous log-probability."""
    support: tuple[int, ...]
    """Tokens that are inside the support here and outside it there, or the other way round."""


def mixed_rollouts() -> RolloutBatch:
    """Filters and temperatures that differ, sequences without a filter, a masked one, one that the engine excludes."""
    rollouts = make_rollouts(groups=2, samples=4, seed=5)
    generator = torch.Generator().manual_seed(6)
    generation = rollouts.generation_logprobs.clone()
    generation[rollouts.sequence_ids == 4] = -torch.inf
    generation[~rollouts.response_mask] = torch.nan  # never looked at
    sample_mask = torch.ones(8, dtype=torch.bool)
    sample_mask[3] = False
    return replace(
        rollouts,
        temperature=0.7 + torch.rand(8, generator=generator),
        top_k=torch.tensor([70, 0, 40, 0, 90, 60, 0, 70]),
        top_p=torch.tensor([0.9, 1.0, 1.0, 0.95, 0.9, 1.0, 1.0, 0.99]),
        generation_logprobs=generation,
        sample_mask=sample_mask,
    )


def boundary_distance(step: ActorStep, rollouts: RolloutBatch) -> Tensor:
    """How far each response token is from the border of its support, in one process: fp64 ``[N]``.

    The smaller of two distances: of its logit from the smallest one that top-k keeps (or, inside, from the largest one
    that it drops), and of the probability mass above it from top-p. Infinite where there is no filter.
    """
    sequences = [
        rollouts.tokens[start:end]
        for start, end in zip(rollouts.cu_seqlens[:-1].tolist(), rollouts.cu_seqlens[1:].tolist(), strict=True)
    ]
    logits = whole_logits(step.model, sequences, step.groups, packed=True)[:-1]  # row t predicts token t + 1
    ids = rollouts.sequence_ids[1:]
    top_k, top_p, targets = rollouts.top_k[ids], rollouts.top_p[ids], rollouts.tokens[1:]
    found = reference(logits, targets, temperature=rollouts.temperature[ids], top_k=top_k, top_p=top_p)
    mass = found.boundary_gap.gather(1, targets[:, None])[:, 0].abs()
    ordered = found.scaled.detach().sort(dim=1, descending=True).values
    own = found.scaled.detach().gather(1, targets[:, None])[:, 0]
    last = ordered.gather(1, (top_k - 1).clamp_min(0)[:, None])[:, 0]
    first_out = ordered.gather(1, top_k.clamp_max(ordered.shape[1] - 1)[:, None])[:, 0]
    rank = torch.where(own >= last, own - first_out, last - own)
    distance = torch.minimum(
        torch.where(top_p < 1, mass, math.inf), torch.where((top_k > 0) & (top_k < ordered.shape[1]), rank, math.inf)
    )
    whole = torch.cat([distance.new_full((1,), math.inf), distance])
    return torch.where(rollouts.response_mask, whole, math.inf)


def loss_of(loss: str, normalization: str) -> dict[str, Any]:
    return LOSSES[loss] | {"normalization": normalization}


def run_steps(rank: int, world: int, setup: dict[str, Any], configs: dict[Any, dict[str, Any]], **model: Any):
    """``{key: StepOutcome}`` of one actor step for each configuration (of one minibatch), on one model."""
    base = make_step(**(setup | {"optimizer": STILL | setup.get("optimizer", {})}), **model)
    with base.reference.swapped_into(base.model.chunks), torch.no_grad():
        for chunk in base.model.bare_chunks:  # another policy, or the KL term would be 0
            for parameter in chunk.parameters():
                parameter.mul_(1.5)
    filled: dict[str, RolloutBatch] = {}
    outcomes = {}
    for key, config in configs.items():
        step = ActorStep(
            base.model,
            base.optimizer,
            base.scheduler,
            ActorStepConfig.from_dict(config),
            groups=base.groups,
            reference=base.reference,
        )
        packing = step.config.microbatch.layout
        if packing in filled:  # previous and reference pass and advantages know nothing of the loss
            sequences = torch.arange(filled[packing].num_sequences)
            found, _, _ = step._minibatch(filled[packing], sequences, LeftOut("raise", len(sequences)))
            metrics = found.compute()
        else:
            result = step.step(mixed_rollouts())
            filled[packing], metrics = result.rollouts, result.metrics
        outcomes[key] = StepOutcome(
            gradients=parameter_gradients(base.model),
            metrics={name: value for name, value in metrics.items() if not name.startswith("seconds/")},
            previous=filled[packing].prev_logprobs,
            tensor_rank=base.groups.tensor_rank,
        )
    return outcomes


def run_layout(rank: int, world: int, layout: Layout, expected: dict[tuple[str, str], StepOutcome]):
    """``{(loss, normalization, packing): Difference}`` of a layout on this rank."""
    configs = {
        (loss, normalization, packing): {
            "loss": loss_of(loss, normalization),
            "microbatch": {"max_tokens": layout.budget, "layout": packing},
            "logprobs": {"fused_head": layout.fused_head},
        }
        for loss in LOSSES
        for normalization in NORMALIZATIONS
        for packing in PACKINGS
    }
    outcomes = run_steps(rank, world, layout.setup, configs)
    return {key: difference(outcome, expected[key[:2]], tensor=layout.tensor) for key, outcome in outcomes.items()}


def difference(outcome: StepOutcome, expected: StepOutcome, *, tensor: int) -> Difference:
    worst, where, seen = 0.0, "", set()
    for own_name, gradient in outcome.gradients.items():
        # the last pipeline stage has a copy of the tied embedding, which gets the whole gradient too
        name = "embedding.word_embeddings.weight" if own_name == "output_layer.weight" else own_name
        whole = expected.gradients[name]
        distance = (gradient - shard_of(name, whole, tensor, outcome.tensor_rank)).abs().max() / whole.abs().max()
        if not float(distance) <= worst:
            worst, where = float(distance), name
        seen.add(name)
    finite = expected.previous.isfinite() & outcome.previous.isfinite()
    differs = torch.isneginf(outcome.previous) != torch.isneginf(expected.previous)
    return Difference(
        worst=worst,
        where=where,
        seen=frozenset(seen),
        metrics=outcome.metrics,
        logprobs=float((outcome.previous - expected.previous)[finite].abs().max()),
        support=tuple(differs.nonzero().flatten().tolist()),
    )
