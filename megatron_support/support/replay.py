"""Replayed supports: the sampler's own kept sets, as given, in place of a recomputed filter.

The filtered log-probability is renormalised over the given ids. A target that is not in its own set is a fault in the
data, not an exclusion; so are ids outside the vocabulary, ids given twice and offsets that do not describe the tokens.
An empty set means that the token was not sampled under a filter: its filtered log-probability is the unfiltered one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.errors import RolloutError
from megatron_support.support.rows import Rows
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.types import RolloutSupport


@dataclass(frozen=True)
class ReplayedSets:
    """The part of the sets that this rank's columns hold, as pairs of an entry and a column."""

    entry: Tensor
    """int64 ``[N]``, which of the rows worked on."""

    column: Tensor
    """int64 ``[N]``, column of this rank's logits."""

    empty: Tensor
    """bool ``[A]``, rows without a set."""


def check_support(
    support: RolloutSupport, targets: Tensor, vocab_size: int, *, name: Callable[[int], str] | None = None
) -> None:
    """Check that every target has a set that fits the vocabulary and holds it, or an empty one.

    Args:
        targets: int64 ``[T]`` or ``[samples, tokens]``, in the order of the sets; sets of targets < 0 are ignored.
        name: what to call a token, by its position in the flat order, :func:`packed_names` for instance; None counts
            samples and tokens from 0, or tokens alone where the targets are flat.

    Raises:
        RolloutError: naming the sample and token at fault, the value and the remedy.
    """
    count, offsets, ids = targets.numel(), support.offsets, support.token_ids
    if offsets.dim() != 1 or offsets.numel() != count + 1:
        raise RolloutError(
            f"replayed support has {offsets.numel()} offsets for {count} tokens; give one more than tokens"
        )
    if int(offsets[0]) != 0 or int(offsets[-1]) != ids.numel():
        raise RolloutError(
            f"replayed support offsets must run from 0 to the number of token ids, {ids.numel()}, got "
            f"{int(offsets[0])} to {int(offsets[-1])}; slice token_ids and offsets together"
        )
    lengths = offsets.diff()

    def raise_at(wrong: Tensor, message: str) -> None:
        _raise_at(wrong, targets, message, name)

    raise_at(lengths < 0, "offsets descend; sort the sets by token")
    owner = torch.repeat_interleave(torch.arange(count, device=ids.device), lengths)
    flat = targets.reshape(-1)

    def per_token(wrong: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.bool, device=ids.device).index_put_((owner[wrong],), wrong.new_ones(()))

    raise_at(
        per_token((ids < 0) | (ids >= vocab_size)) & (flat >= 0),
        f"a token id is outside the vocabulary of {vocab_size}; use the sampler's own vocabulary size",
    )
    key = (owner * vocab_size + ids).sort().values
    twice = key[1:][key[1:] == key[:-1]] // vocab_size
    repeated = torch.zeros(count, dtype=torch.bool, device=ids.device)
    repeated[twice] = True
    raise_at(repeated & (flat >= 0), "a token id is given twice; give each id once")
    holds = per_token(ids == flat[owner])
    raise_at(
        ~holds & (lengths > 0) & (flat >= 0),
        "the sampled token is not in its own set; export the set with the sampled token, or leave it empty",
    )


def packed_names(cu_seqlens: Tensor, sample_ids: Sequence[object] | None = None) -> Callable[[int], str]:
    """Names sample and token of a position in samples stored end to end.

    Args:
        cu_seqlens: int64 ``[S + 1]``, where each sample begins, and the end.
        sample_ids: names of the samples; None counts them from 0.
    """

    def name(position: int) -> str:
        sample = int(torch.searchsorted(cu_seqlens, position, right=True)) - 1
        token = position - int(cu_seqlens[sample])
        return f"sample {sample if sample_ids is None else repr(sample_ids[sample])}, token {token}"

    return name


def _raise_at(wrong: Tensor, targets: Tensor, message: str, name: Callable[[int], str] | None) -> None:
    places = wrong.nonzero().flatten()
    if not places.numel():
        return
    place = int(places[0])
    if name is not None:
        where = name(place)
    elif targets.dim() > 1:
        where = f"sample {place // targets.shape[-1]}, token {place % targets.shape[-1]}"
    else:
        where = f"token {place}"
    raise RolloutError(
        f"replayed support of {where} (target {int(targets.reshape(-1)[place])}): {message} "
        f"({places.numel()} tokens in all)"
    )


def take_sets(support: RolloutSupport, tokens: Tensor) -> RolloutSupport:
    """The sets of some tokens ``[n]``, in that order."""
    lengths = support.offsets.diff()[tokens]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    within = torch.arange(int(offsets[-1]), device=lengths.device) - torch.repeat_interleave(offsets[:-1], lengths)
    places = torch.repeat_interleave(support.offsets[:-1][tokens], lengths) + within
    return RolloutSupport(support.token_ids[places], offsets)


def local_sets(support: RolloutSupport, index: Tensor, shard: VocabularyShard) -> ReplayedSets:
    """The sets of rows ``index [A]``, restricted to the columns of this rank."""
    count = support.offsets.numel() - 1
    lengths = support.offsets.diff()
    device = index.device
    entry_of = torch.full((count,), -1, dtype=torch.int64, device=device)
    entry_of[index] = torch.arange(index.numel(), device=device)
    entry = torch.repeat_interleave(entry_of, lengths)
    column = support.token_ids - shard.start
    mine = (entry >= 0) & (column >= 0) & (column < shard.width)
    return ReplayedSets(entry[mine], column[mine], lengths[index] == 0)


def set_values(rows: Rows, sets: ReplayedSets) -> Tensor:
    """Scaled logits ``[N]`` of the sets' ids."""
    return rows.scaled_at(sets.entry, sets.column)


def set_maximum(values: Tensor, sets: ReplayedSets) -> Tensor:
    """Largest value of each row's set on this rank, ``[A]``; -inf where it holds none."""
    none = torch.full(sets.empty.shape, -torch.inf, dtype=values.dtype, device=values.device)
    return none.scatter_reduce(0, sets.entry, values, "amax")


def set_log_mass(
    values: Tensor, sets: ReplayedSets, largest: Tensor, maximum: Tensor, log_normalizer: Tensor, shard: VocabularyShard
) -> Tensor:
    """float64 ``[A]``: log of each set's mass relative to the row's maximum; of the whole row where the set is empty.

    Args:
        largest: ``[A]``, largest logit of each set over all ranks.
        maximum: ``[A]``, of the row.
        log_normalizer: float64 ``[A]``, log of the row's mass relative to its maximum.
    """
    mass = (values.double() - largest[sets.entry].double()).exp()
    total = torch.zeros(sets.empty.shape, dtype=torch.float64, device=values.device).index_add_(0, sets.entry, mass)
    log_mass = shard.total(total).log() + (largest.double() - maximum.double())
    return torch.where(sets.empty, log_normalizer, log_mass)
