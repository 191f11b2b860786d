"""Where rollouts come from: files, or the model itself on a built-in task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from megatron_support.config.recipe import SamplerRollouts
from megatron_support.megatron.generate import Response, Sampler
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.training.tasks import Task
from megatron_support.types import RolloutSupport, SamplingParams


class RolloutSource(Protocol):
    """What the loop asks for rollouts."""

    def rollouts(self, step: int) -> RolloutBatch:
        """The rollouts of step 0, 1, ...; the same on every rank."""
        ...


class FileSource:
    """Rows of a file, in order, from the start again when it ends.

    Args:
        batch: all rows.
        sequences_per_step: rows of one step; at most as many as there are.
    """

    def __init__(self, batch: RolloutBatch, sequences_per_step: int) -> None:
        assert 1 <= sequences_per_step <= batch.num_sequences
        self._batch = batch
        self._count = sequences_per_step

    def rollouts(self, step: int) -> RolloutBatch:
        rows = torch.arange(step * self._count, (step + 1) * self._count) % self._batch.num_sequences
        return self._batch.select(rows)


class SamplerSource:
    """Prompts of a task, responses of the model, rewards of the task.

    Args:
        task: prompts and rewards.
        sampler: refreshed before each step, so that responses come from the present weights.
        config: counts and sampling parameters.
        seed: of prompts and draws.
        record_support: whether the sampler's kept sets go along, for a trainer that replays them.
        on_phase: called as ``("sampling", 0, 1)`` before the model starts.
    """

    def __init__(
        self,
        task: Task,
        sampler: Sampler,
        config: SamplerRollouts,
        *,
        seed: int,
        record_support: bool = False,
        on_phase: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> None:
        self._task = task
        self._sampler = sampler
        self._config = config
        self._seed = seed
        self._record_support = record_support
        self._on_phase = on_phase

    def rollouts(self, step: int) -> RolloutBatch:
        config = self._config
        self._on_phase("sampling", 0, 1)
        self._sampler.refresh()
        unique = self._task.prompts(step, config.prompts_per_step, self._seed)
        prompts = [prompt for prompt in unique for _ in range(config.samples_per_prompt)]
        responses = self._sampler.generate(
            prompts,
            SamplingParams(config.sampling.temperature, config.sampling.top_k, config.sampling.top_p),
            max_new_tokens=config.max_new_tokens,
            eos=self._task.eos,
            seed=_step_seed(self._seed, step),
            record_support=self._record_support,
        )
        return make_rollouts(self._task, prompts, responses, config, step=step)


def make_rollouts(
    task: Task, prompts: list[list[int]], responses: list[Response], config: SamplerRollouts, *, step: int
) -> RolloutBatch:
    """Put prompts and responses end to end, and reward them.

    Args:
        task: rewards each response.
        prompts: ``samples_per_prompt`` equal ones in a row.
        responses: one for each prompt.
        config: the sampling parameters that were used.
        step: for the sample ids ``step-prompt-sample``.
    """
    count, group = len(prompts), config.samples_per_prompt
    pairs = list(zip(prompts, responses, strict=True))
    lengths = torch.tensor([len(prompt) + len(response.tokens) for prompt, response in pairs])
    tokens = [token for prompt, response in pairs for token in (*prompt, *response.tokens)]
    logprobs = [value for prompt, response in pairs for value in (*([0.0] * len(prompt)), *response.logprobs)]
    response_mask = [i >= len(prompt) for prompt, r in pairs for i in range(len(prompt) + len(r.tokens))]
    sampling = config.sampling
    return RolloutBatch(
        tokens=torch.tensor(tokens),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        response_mask=torch.tensor(response_mask),
        rewards=torch.tensor([task.reward(prompt, response.tokens) for prompt, response in pairs]),
        sample_mask=torch.ones(count, dtype=torch.bool),
        group_ids=torch.arange(count) // group,
        temperature=torch.full((count,), sampling.temperature),
        top_k=torch.full((count,), sampling.top_k or 0),
        top_p=torch.full((count,), sampling.top_p),
        sample_ids=tuple(f"{step}-{row // group}-{row % group}" for row in range(count)),
        support=_support(pairs),
        prompts=tuple(task.decode(prompt) for prompt in prompts),
        responses=tuple(task.decode(response.tokens) for response in responses),
        generation_logprobs=torch.tensor(logprobs),
    )


def _support(pairs: list[tuple[list[int], Response]]) -> RolloutSupport | None:
    sets: list[tuple[int, ...]] = []
    for prompt, response in pairs:
        if response.kept is None:
            return None
        sets += [()] * len(prompt) + list(response.kept)
    sizes = torch.tensor([len(kept) for kept in sets])
    token_ids = torch.tensor([token for kept in sets for token in kept], dtype=torch.int64)
    return RolloutSupport(token_ids, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))


def _step_seed(seed: int, step: int) -> int:
    """Far apart for neighbouring steps and seeds, within what torch takes."""
    return (seed * 1_000_003 + step * 7_919) % (2**63)
