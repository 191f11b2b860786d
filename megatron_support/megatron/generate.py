"""Batched sampling by the model itself, under any layout: the inference engine of the built-in tasks.

It is made for small models and short responses: the prefix is computed again for every token, and the logits of one
position of each sequence are gathered over the tensor-parallel ranks. Sequences are padded on the right, which causal
attention never sees; a sequence leaves the batch when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.config.recipe import ModelConfig, ParallelConfig, RandomWeights
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.minibatch import token_multiples
from megatron_support.megatron.model import build_model
from megatron_support.megatron.parts import ModelParts, evaluating, model_forward
from megatron_support.megatron.schedule import run_schedule
from megatron_support.rollouts.microbatch import context_positions
from megatron_support.types import SamplingParams, TokenBatch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Response:
    """What was sampled after one prompt."""

    tokens: tuple[int, ...]
    """Ends with the end-of-sequence token unless it was cut off."""
    logprobs: tuple[float, ...]
    """Of each token, under temperature, top-k and top-p, by the sampler's own logits."""
    kept: tuple[tuple[int, ...], ...] | None
    """The support that each token was drawn from, ascending ids; None unless asked for."""


class Sampler:
    """A copy of the trainer's model, in a precision of its own, that continues prompts.

    Args:
        trainer: this rank's chunks of the model that is trained; :meth:`refresh` copies its weights.
        parallel: the layout that ``groups`` were made for.
        groups: the ranks' layout.
        dtype: precision of weights and activations of the copy.
        max_tokens: token budget of one forward microbatch on this rank.
        transformer_impl: as in the recipe.
    """

    def __init__(
        self,
        trainer: ModelParts,
        parallel: ParallelConfig,
        groups: ParallelGroups,
        *,
        dtype: Literal["float32", "bfloat16"],
        max_tokens: int,
        transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto",
    ) -> None:
        config = ModelConfig(
            architecture=trainer.architecture, weights=RandomWeights(), transformer_impl=transformer_impl
        )
        self.model = build_model(config, parallel, groups, seed=0, dtype=_DTYPES[dtype], device=trainer.device)
        self.groups = groups
        self.max_tokens = max_tokens
        self._trainer = trainer
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the trainer's present weights, rounded to this copy's precision."""
        for target, source in zip(self.model.bare_chunks, self._trainer.bare_chunks, strict=True):
            for copy, parameter in zip(target.parameters(), source.parameters(), strict=True):
                copy.copy_(parameter)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        max_new_tokens: int,
        eos: int,
        seed: int,
        record_support: bool = False,
    ) -> list[Response]:
        """Continue every prompt until ``eos`` or ``max_new_tokens``. Collective.

        Prompts are shared out over data-parallel ranks. The uniform number behind token i of prompt s depends on seed,
        s and i alone, so another layout draws the same tokens wherever its logits are the same.

        Args:
            prompts: token ids, at least one each; the same list on every rank.
            sampling: numbers.
            max_new_tokens: per response.
            eos: the token that ends a response and belongs to it.
            seed: of the draws.
            record_support: whether to keep the support of each token.

        Returns:
            One response for each prompt, in order, the same on every rank.
        """
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(len(prompts), max_new_tokens, generator=generator, dtype=torch.float64)
        mine = torch.arange(len(prompts)).tensor_split(self.groups.data_size)[self.groups.data_rank]
        rows = _Rows([prompts[i] for i in mine.tolist()], max_new_tokens, eos)
        with torch.no_grad(), evaluating(self.model):
            for column in draws[mine].T:
                active = rows.active()
                if active.numel() == 0:
                    break
                rows.append(active, *self._next(rows, active, column[active], sampling, record_support))
        return _gather(rows.responses(record_support), self.groups)

    def _next(
        self, rows: _Rows, active: Tensor, draws: Tensor, sampling: SamplingParams, record_support: bool
    ) -> tuple[Tensor, Tensor, list[tuple[int, ...]]]:
        """Token, log-probability and support of the next position of rows ``active [A]``, on every rank."""
        logits = self._last_logits(rows.tokens[active], rows.lengths[active])
        drawn = torch.zeros(2, active.numel(), dtype=torch.float64, device=self.model.device)
        kept: list[tuple[int, ...]] = []
        if logits is not None:
            probabilities = sampling_probabilities(logits, sampling)
            chosen = draw(probabilities, draws.to(logits.device))
            drawn = torch.stack([chosen.double(), probabilities.gather(1, chosen[:, None]).squeeze(1).log()])
            if record_support:
                kept = [tuple(row.nonzero().flatten().tolist()) for row in probabilities.cpu()]
            # the ranks of a layer agree by construction; a broadcast makes sure of it on any device
            for group in (self.groups.tensor, self.groups.context):
                if group is not None:
                    dist.broadcast(drawn, src=dist.get_process_group_ranks(group)[0], group=group)
        if self.groups.pipeline is not None:
            dist.broadcast(drawn, src=self.groups.last_stage_rank, group=self.groups.pipeline)
            if record_support:
                box = [kept]
                dist.broadcast_object_list(box, src=self.groups.last_stage_rank, group=self.groups.pipeline)
                kept = box[0]
        tokens, logprobs = drawn.cpu()
        return tokens.long(), logprobs, kept

    def _last_logits(self, tokens: Tensor, lengths: Tensor) -> Tensor | None:
        """fp32 logits ``[A, V]`` after the last token of each row ``[A, L]``; None before the last pipeline stage."""
        slices = self._slices(tokens, lengths)
        width = self.model.padded_vocab_size // self.groups.tensor_size
        shard = torch.zeros(lengths.numel(), width, device=self.model.device)

        def forward_step(iterator: Iterator[TokenBatch], chunk: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)

            def collect(logits: Tensor, non_loss_data: bool = True) -> None:
                shard[batch.sequence_ids[batch.response_mask]] = logits[batch.response_mask].float()

            return model_forward(chunk, batch), collect

        run_schedule(self.model, slices, forward_step, forward_only=True)
        if not self.groups.is_last_stage:
            return None
        if self.groups.context is not None:  # one rank holds the last position, the others 0
            dist.all_reduce(shard, group=self.groups.context)
        if self.groups.tensor is not None:
            parts = [torch.empty_like(shard) for _ in range(self.groups.tensor_size)]
            dist.all_gather(parts, shard, group=self.groups.tensor)
            shard = torch.cat(parts, dim=1)
        return shard[:, : self.model.vocab_size]

    def _slices(self, tokens: Tensor, lengths: Tensor) -> _Slices:
        """The rows as microbatches of one shape, as many as fill the pipeline."""
        groups = self.groups
        _, multiple = token_multiples(
            context_size=groups.context_size,
            tensor_size=groups.tensor_size,
            sequence_parallel=self.model.config.sequence_parallel,
        )
        width = -(-int(lengths.max()) // multiple) * multiple
        rows = lengths.numel()
        count = -(-rows * width // self.max_tokens)
        count = -(-min(count, rows) // groups.pipeline_size) * groups.pipeline_size
        height = -(-rows // count)
        # rows that fill up the last microbatches; nothing is read from them
        tokens = torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1]), 0, height * count - rows))
        positions = context_positions(torch.tensor([width]), groups.context_size, groups.context_rank)
        last = torch.nn.functional.pad(lengths - 1, (0, height * count - rows), value=-1)
        batches = [
            _token_batch(block, ends, positions, first=index * height).to(self.model.device)
            for index, (block, ends) in enumerate(zip(tokens.split(height), last.split(height), strict=True))
        ]
        return _Slices(microbatches=tuple(batches), micro_batch_size=height, seq_length=width)


@dataclass(frozen=True, kw_only=True)
class _Slices:
    """What :func:`run_schedule` needs of a minibatch."""

    microbatches: tuple[TokenBatch, ...]
    micro_batch_size: int
    seq_length: int


class _Rows:
    """Sequences that grow."""

    def __init__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: int) -> None:
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        longest = int(self.lengths.max()) if prompts else 0
        self.tokens = torch.zeros(len(prompts), longest + max_new_tokens, dtype=torch.int64)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        self._eos = eos
        self._ended = torch.zeros(len(prompts), dtype=torch.bool)
        self._new: list[list[int]] = [[] for _ in prompts]
        self._logprobs: list[list[float]] = [[] for _ in prompts]
        self._kept: list[list[tuple[int, ...]]] = [[] for _ in prompts]

    def active(self) -> Tensor:
        """int64: rows that have not ended."""
        return (~self._ended).nonzero().flatten()

    def append(self, active: Tensor, tokens: Tensor, logprobs: Tensor, kept: Sequence[tuple[int, ...]]) -> None:
        """One more token on each row of ``active``."""
        self.tokens[active, self.lengths[active]] = tokens
        self.lengths[active] += 1
        self._ended[active] = tokens == self._eos
        for place, row in enumerate(active.tolist()):
            self._new[row].append(int(tokens[place]))
            self._logprobs[row].append(float(logprobs[place]))
            if kept:
                self._kept[row].append(kept[place])

    def responses(self, record_support: bool) -> list[Response]:
        return [
            Response(tokens=tuple(new), logprobs=tuple(logprobs), kept=tuple(kept) if record_support else None)
            for new, logprobs, kept in zip(self._new, self._logprobs, self._kept, strict=True)
        ]


def sampling_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The distribution that tokens are drawn from, by the rule that the trainer uses for its support.

    ``x = logits / temperature``; kept are all x >= the k-th largest; of these, those with less than p of their mass
    strictly above them. Equal logits are kept or left out together.

    Args:
        logits: fp32 ``[A, V]``.
        sampling: numbers.

    Returns:
        fp64 ``[A, V]``, each row sums to 1; 0 outside the support.
    """
    assert not any(isinstance(value, Tensor) for value in (sampling.temperature, sampling.top_k, sampling.top_p))
    scaled = (logits / sampling.temperature).double()
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        smallest = scaled.topk(int(sampling.top_k), dim=1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    probabilities = scaled.softmax(dim=1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=1, descending=True)
        above = ordered.cumsum(dim=1) - ordered
        # the first of equals has the mass strictly above all of them
        first = torch.searchsorted(-ordered, -ordered, right=False)
        kept = torch.zeros_like(probabilities, dtype=torch.bool)
        kept.scatter_(1, order, above.gather(1, first) < sampling.top_p)
        probabilities = torch.where(kept, probabilities, 0.0)
    return probabilities / probabilities.sum(dim=1, keepdim=True)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-transform sampling in the order of ids: the first token whose cumulative probability exceeds the draw.

    Args:
        probabilities: fp64 ``[A, V]``.
        uniform: fp64 ``[A]`` in [0, 1).

    Returns:
        int64 ``[A]``; never a token of probability 0.
    """
    cumulative = probabilities.cumsum(dim=1)
    chosen = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    last = probabilities.shape[1] - 1 - (probabilities.flip(1) > 0).int().argmax(dim=1)
    return torch.minimum(chosen, last)  # the product may round up to the whole mass


def _token_batch(tokens: Tensor, ends: Tensor, positions: Tensor, *, first: int) -> TokenBatch:
    """A padded microbatch of this context-parallel rank; ``response_mask`` marks each row's last token."""
    height = tokens.shape[0]
    input_ids = tokens[:, positions]
    blank = torch.full((input_ids.numel(),), -1)
    return TokenBatch(
        input_ids=input_ids,
        position_ids=positions.expand(height, -1).contiguous(),
        targets=blank,
        response_mask=(positions[None] == ends[:, None]).flatten(),
        sequence_ids=(first + torch.arange(height)).repeat_interleave(positions.numel()),
        token_index=blank,
        sampling=SamplingParams(),
        num_sequences=height,
    )


def _gather(responses: list[Response], groups: ParallelGroups) -> list[Response]:
    """All data-parallel ranks' responses, in the order of the prompts."""
    if groups.data is None:
        return responses
    parts: list[list[Response]] = [[] for _ in range(groups.data_size)]
    dist.all_gather_object(parts, responses, group=groups.data)
    return [response for part in parts for response in part]
