"""How far a replayed support is from the one recomputed from the trainer's logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_support.metrics import Mean, MetricSet
from megatron_support.support.arguments import Ties, build_rows, check_arguments, check_targets, resolve_filters
from megatron_support.support.engine import find_support
from megatron_support.support.replay import check_support, local_sets, set_values
from megatron_support.support.vocabulary import VocabularyShard
from megatron_support.types import RolloutSupport, SamplingParams


@torch.no_grad()
def compare_supports(
    vocab_parallel_logits: Tensor,
    targets: Tensor,
    sampling: SamplingParams,
    support: RolloutSupport,
    *,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    ties: Ties = "group",
) -> MetricSet:
    """Compare the sampler's kept sets S with the sets R that the trainer's own logits leave, over tokens with a set.

    Args:
        vocab_parallel_logits, targets, sampling, vocab_size, tp_group, ties: as for ``support_logprobs``.
        support: the sampler's sets.

    Returns:
        Means over the tokens that have a target and a set, the same on every rank of ``tp_group``:
        ``support_jaccard`` ``|R & S| / |R | S|``; ``replayed_support_size`` ``|S|``; ``recomputed_support_size``
        ``|R|``; ``replayed_mass_outside`` and ``recomputed_mass_outside``, the trainer's probability, within S and
        within R, of what the other does not hold.

    Raises:
        ValueError: as ``support_logprobs``; also when ``sampling`` filters nothing.
    """
    check_arguments(vocab_parallel_logits, targets, sampling, ties, None)
    logits = vocab_parallel_logits.detach().reshape(-1, vocab_parallel_logits.shape[-1])
    shard = VocabularyShard.of(logits.shape[1], vocab_size, tp_group)
    flat = targets.reshape(-1)
    check_targets(flat, shard)
    check_support(support, targets, shard.size)
    wanted = (flat >= 0) & (support.offsets.diff() > 0)
    rows = build_rows(logits, wanted, sampling, shard)
    filters = resolve_filters(sampling, rows.index, shard, index_ties=ties == "index")
    if filters is None:
        raise ValueError(
            f"top_k={sampling.top_k} and top_p={sampling.top_p} filter nothing, so there is no support to compare the "
            "replayed one with; pass the sampler's own settings"
        )
    tokens = rows.index.numel()
    if tokens == 0:
        return _metrics(torch.zeros(5, 0, dtype=torch.float64, device=logits.device))
    found = find_support(rows, flat[rows.index], shard, filters, entropy=False, listed=False)
    recomputed = torch.zeros(tokens, dtype=torch.float64, device=logits.device)
    for chunk in rows.chunks:
        recomputed[chunk.at] = found.kept(rows, chunk, rows.scaled(chunk), shard).sum(1, dtype=torch.float64)
    sets = local_sets(support, rows.index, shard)
    values = set_values(rows, sets)
    kept = found.keeps(values, sets.entry, sets.column + shard.start)
    mass = (values.double() - found.maximum[sets.entry].double()).exp()
    sums = torch.zeros(tokens, 4, dtype=torch.float64, device=logits.device)
    sums[:, 0] = recomputed
    sums[:, 1].index_add_(0, sets.entry, kept.double())
    sums[:, 2].index_add_(0, sets.entry, torch.where(kept, mass, 0.0))
    sums[:, 3].index_add_(0, sets.entry, mass)
    recomputed, both, mass_both, mass_replayed = shard.total(sums).unbind(1)
    replayed = support.offsets.diff()[rows.index].double()
    return _metrics(
        torch.stack(
            [
                both / (recomputed + replayed - both),
                replayed,
                recomputed,
                1 - mass_both / mass_replayed,
                1 - mass_both / found.log_kept.exp(),
            ]
        )
    )


def _metrics(values: Tensor) -> MetricSet:
    names = (
        "support_jaccard",
        "replayed_support_size",
        "recomputed_support_size",
        "replayed_mass_outside",
        "recomputed_mass_outside",
    )
    return MetricSet({name: Mean(row.sum(), values.shape[1]) for name, row in zip(names, values, strict=True)})
