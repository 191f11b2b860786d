"""What a check computes under every layout: a recipe's step on one batch, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.recipe import FileRollouts, MicrobatchConfig, Recipe
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.training.check_layouts.layouts import Budgets

_SEQUENCES = 16
"""Of a recipe's batch."""
_SEED = 20
_PARTS = 4
"""Into which the small budget cuts the batch of one data-parallel rank, at most."""

_MODEL = {
    "vocab_size": 100,
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 96,
    "max_sequence_length": 64,
}

_LOSSES: Mapping[str, Mapping[str, Any]] = {
    "token": {
        "kl": {"coef": 0.05, "type": "k2"},
        "entropy_coef": 0.01,
        "correction": {"type": "tis", "high": 2.0},
    },
    "GSPO": {
        "surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "ratio_level": "sequence",
        "aggregation": {"type": "sequence_mean"},
        "normalization": "survivors",
        "kl": {"coef": 0.05, "type": "k3"},
    },
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A recipe whose layout is still to be chosen, and the losses to run."""

    recipe: Recipe
    """In float32 with Megatron's local layers and one minibatch, so that layouts differ by rounding alone."""
    losses: Mapping[str, ActorLossConfig]
    reference: MicrobatchConfig
    """How the one process cuts the batch."""


def own_problem() -> Problem:
    """The built-in one: a small random model and two losses, one by token, one by sequence (GSPO)."""
    whole = 4096
    recipe = Recipe.from_dict(
        {
            "name": "check",
            "device": "auto",
            "model": {"architecture": _MODEL, "dtype": "float32", "transformer_impl": "local"},
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
            "rollouts": {"type": "files", "paths": ["built-in"], "sequences_per_step": 12},
            "loss": _LOSSES["token"],
            "train": {"steps": 1, "microbatch": {"max_tokens": whole}},
        }
    )
    return Problem(
        recipe=recipe,
        losses={name: ActorLossConfig.from_dict(loss) for name, loss in _LOSSES.items()},
        reference=MicrobatchConfig(max_tokens=whole),
    )


def recipe_problem(recipe: Recipe) -> Problem:
    """A user's recipe with its own loss and layout.

    Changed: float32 and local layers, no clipping, the whole batch as one minibatch, few sequences, truncated before.
    """
    train = recipe.train.model_copy(update={"steps": 1, "minibatches": 1, "epochs": 1, "shuffle": False})
    rollouts = recipe.rollouts
    if rollouts.type == "files":
        few = {"sequences_per_step": min(_SEQUENCES, rollouts.sequences_per_step)}
    else:
        most = max(1, _SEQUENCES // rollouts.samples_per_prompt)
        few = {"prompts_per_step": min(most, rollouts.prompts_per_step)}
    changed = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"dtype": "float32", "transformer_impl": "local"}),
            "optimizer": recipe.optimizer.model_copy(update={"clip_grad": 0.0}),
            "rollouts": rollouts.model_copy(update=few),
            "train": train,
        }
    )
    return Problem(
        recipe=changed,
        losses={"recipe": recipe.loss},
        reference=train.microbatch.model_copy(update={"truncate": False}),  # the batch is cut before
    )


def budgets_of(problem: Problem, lengths: Tensor, world: int) -> Budgets:
    """Token budgets that every layout of a world can keep: context parallelism pads each sequence.

    Args:
        problem: its own budget is the whole one.
        lengths: of the batch's sequences.
        world: number of ranks.
    """
    multiple = 2 * world
    longest = -(-int(lengths.max()) // multiple) * multiple
    return Budgets(small=max(longest, int(lengths.sum()) // _PARTS), whole=max(longest, problem.reference.max_tokens))


def own_rollouts() -> RolloutBatch:
    """12 sequences of 5 to 16 random tokens. Filters differ by sequence, some have none; one sequence is masked out."""
    generator = torch.Generator().manual_seed(_SEED)
    count, prompt = 12, 3
    lengths = torch.randint(5, 17, (count,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu_seqlens[-1])
    position = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
    response = position >= prompt
    generation = torch.where(response, -2 - 4 * torch.rand(total, generator=generator), 0.0)
    generation[int(cu_seqlens[4]) + prompt] = -torch.inf  # the engine's own word that a token was outside
    sample_mask = torch.ones(count, dtype=torch.bool)
    sample_mask[7] = False
    return with_drawn_rewards(
        RolloutBatch(
            tokens=torch.randint(0, _MODEL["vocab_size"], (total,), generator=generator),
            cu_seqlens=cu_seqlens,
            response_mask=response,
            rewards=torch.zeros(count),
            sample_mask=sample_mask,
            group_ids=torch.arange(count) // 4,
            temperature=0.7 + torch.rand(count, generator=generator),
            top_k=torch.tensor([70, 0, 40, 0, 90, 60, 0, 70, 50, 0, 80, 99]),
            top_p=torch.tensor([0.9, 1.0, 1.0, 0.95, 0.9, 1.0, 1.0, 0.9, 0.8, 0.9, 0.95, 1.0]),
            sample_ids=tuple(f"{row // 4}-{row % 4}" for row in range(count)),
            generation_logprobs=generation,
        )
    )


def with_drawn_rewards(rollouts: RolloutBatch) -> RolloutBatch:
    """Random rewards: equal ones in a group would leave no advantage, and nothing to compare."""
    generator = torch.Generator().manual_seed(_SEED)
    components = rollouts.reward_components
    return replace(
        rollouts,
        rewards=torch.rand(rollouts.num_sequences, generator=generator),
        reward_components=None if components is None else torch.rand(components.shape, generator=generator),
    )


def as_files(recipe: Recipe, rollouts: RolloutBatch) -> Recipe:
    """The recipe with a batch that is there already instead of its own source of rollouts."""
    source = FileRollouts(type="files", paths=["in memory"], sequences_per_step=rollouts.num_sequences)
    return recipe.model_copy(update={"rollouts": source})
