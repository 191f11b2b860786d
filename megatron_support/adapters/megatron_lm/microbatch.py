"""A microbatch out of Megatron-LM's columns, and one context-parallel rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.microbatch import context_positions

COLUMNS = ("tokens", "advantages", "old_logprobs", "loss_mask", "position_ids", "ref_logprobs", "inference_logprobs")
"""In the order of ``train_rl.py``."""
_NEEDED = ("tokens", "position_ids", "loss_mask", "advantages")
_LOGPROBS = {"old_logprobs": "prev", "ref_logprobs": "reference", "inference_logprobs": "generation"}


@dataclass(frozen=True, kw_only=True)
class RlMicrobatch:
    """A microbatch on one rank: rows of S tokens, or of S / C on each of C context-parallel ranks."""

    input_ids: Tensor
    """int64 ``[b, S]``."""
    position_ids: Tensor
    """int64 ``[b, S]``."""
    targets: Tensor
    """int64 ``[b, S]``, the token after each; -1 where there is none."""
    response_mask: Tensor
    """bool ``[b, S]``, whether that token is of a response."""
    sequence_ids: Tensor
    """int64 ``[b, S]``."""
    num_sequences: int
    columns: dict[str, Tensor]
    """fp32 ``[b, S]`` about that token: ``advantages``, and those log-probabilities that there are."""
    packed: Any = None
    """Megatron's ``PackedSeqParams``."""

    def counts(self) -> Tensor:
        """int64 ``[2]``: response tokens, and sequences that have any. Of whole rows."""
        per_sequence = torch.bincount(self.sequence_ids[self.response_mask], minlength=self.num_sequences)
        return torch.stack([per_sequence.sum(), (per_sequence > 0).sum()])

    def shard(self, groups: ParallelGroups) -> RlMicrobatch:
        """This context-parallel rank's two chunks of every row.

        Raises:
            ConfigurationError: rows are packed, or cannot be cut.
        """
        if groups.context is None:
            return self
        if self.packed is not None:
            raise ConfigurationError(
                "rl_use_sequence_packing must be off with context parallelism, got "
                f"context_parallel_size {groups.context_size}; turn one of them off"
            )
        mine = row_positions(self.input_ids, groups)
        names = ("input_ids", "position_ids", "targets", "response_mask", "sequence_ids")
        return RlMicrobatch(
            **{name: getattr(self, name)[:, mine] for name in names},
            num_sequences=self.num_sequences,
            columns={name: values[:, mine] for name, values in self.columns.items()},
        )


def row_positions(rows: Tensor, groups: ParallelGroups) -> Tensor:
    """int64 ``[S / C]``: which entries of rows ``[b, S]`` this context-parallel rank holds, in its order."""
    width = torch.tensor([rows.shape[1]])
    return context_positions(width, groups.context_size, groups.context_rank).to(rows.device)


def rl_microbatch(
    batch: Mapping[str, Any],
    *,
    device: torch.device,
    spans: Sequence[tuple[int, int]] | None = None,
    packed: Any = None,
) -> RlMicrobatch:
    """A microbatch from Megatron-LM's columns.

    Args:
        batch: ``tokens``, ``position_ids`` ``[b, S]``; ``loss_mask`` ``[b, S]`` about each token, or ``[b, S - 1]``
            about the next; ``advantages`` ``[sequences]`` or ``[b, S - 1]``; ``old_logprobs``, ``ref_logprobs`` and
            ``inference_logprobs`` ``[b, S - 1]``, each None or absent where there is none.
        device: where the model is.
        spans: (start, length) of each sequence of a packed row; None where a row is a sequence.
        packed: Megatron's parameters of a packed row.

    Raises:
        ConfigurationError: a column is missing.
    """
    missing = [name for name in _NEEDED if batch.get(name) is None]
    if missing:
        raise ConfigurationError(
            f"a microbatch must have {', '.join(_NEEDED)}, got no {', '.join(missing)}; add it to what the data "
            "iterator yields"
        )
    tokens, mask = batch["tokens"].to(device), batch["loss_mask"].to(device) != 0
    mask = pad(mask[:, 1:] if mask.shape == tokens.shape else mask, (0, 1))
    ids, inside, sequences = _sequences(tokens, spans)
    columns = {
        f"{ours}_logprobs": pad(batch[theirs].to(device).float(), (0, 1))
        for theirs, ours in _LOGPROBS.items()
        if batch.get(theirs) is not None
    }
    advantages = batch["advantages"].to(device).float()
    per_token = advantages.dim() == 2
    return RlMicrobatch(
        input_ids=tokens,
        position_ids=batch["position_ids"].to(device),
        targets=pad(tokens[:, 1:], (0, 1), value=-1),
        response_mask=mask & inside,
        sequence_ids=ids,
        num_sequences=sequences,
        columns=columns
        | {"advantages": pad(advantages, (0, 1)) if per_token else pad(advantages, (0, sequences))[ids]},
        packed=packed,
    )


def _sequences(tokens: Tensor, spans: Sequence[tuple[int, int]] | None) -> tuple[Tensor, Tensor, int]:
    """Sequence of each entry ``[b, S]``, whether the entry predicts a token of it, and how many sequences there are."""
    if spans is None:
        rows = torch.arange(len(tokens), device=tokens.device)
        return rows[:, None].expand(tokens.shape), torch.ones_like(tokens, dtype=torch.bool), len(tokens)
    ids, inside = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for index, (start, length) in enumerate(spans):
        predictors = slice(start, max(start + length - 1, start))
        ids[:, predictors], inside[:, predictors] = index, True
    return ids, inside, max(len(spans), 1)  # an empty bin has one sequence without a token
