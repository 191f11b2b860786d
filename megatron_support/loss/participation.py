"""Which tokens each term runs over, after exclusion and after dropping whole sequences, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.loss.layout import Layout
from megatron_support.loss.masks import Exclusions, count, select, sequence_counts


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Masks per token and counts per sequence; per-sequence tensors cover all context-parallel ranks."""

    kl_mask: Tensor
    """bool per token: response & sample mask, less rejected sequences."""
    actor_mask: Tensor
    """bool per token: ``kl_mask`` less excluded tokens and dropped sequences."""
    survives: Tensor
    """bool per token: response & sample mask less excluded tokens, before sequences are dropped."""
    excluded: Exclusions
    valid_counts: Tensor
    """float64 ``[sequences]``, response tokens before exclusion and rejection."""
    kl_counts: Tensor
    """float64 ``[sequences]``, tokens of ``kl_mask``."""
    actor_counts: Tensor
    """float64 ``[sequences]``, tokens of ``actor_mask``."""
    valid_tokens: Tensor
    """int64 scalar: this rank's response tokens before exclusion and rejection."""
    actor_tokens: Tensor
    """int64 scalar: this rank's tokens of ``actor_mask``."""
    excluded_tokens: Tensor
    """int64 scalar: this rank's excluded tokens."""
    owned: Tensor | None
    """bool ``[sequences]``, whether this rank counts the sequence; None for all."""
    rejected: Tensor | None
    """bool ``[sequences]``, log-probability error over the threshold; None for no check."""
    dropped: Tensor | None
    """bool ``[sequences]``, actor term left by min_support_fraction or OPSM; None for no rule."""

    def count_sequences(self, chosen: Tensor) -> Tensor:
        """int64 scalar: sequences of a bool ``[sequences]``, each counted on one context-parallel rank."""
        return count(chosen if self.owned is None else chosen & self.owned)


@dataclass(frozen=True, kw_only=True)
class DropRules:
    """Numbers that decide whether a whole sequence leaves; None for no rule."""

    min_support_fraction: float = 0.0
    error_threshold: float | None = None
    opsm_threshold: float | None = None


def participation(
    valid: Tensor,
    excluded: Exclusions,
    layout: Layout,
    *,
    rules: DropRules,
    curr_logprobs: Tensor,
    prev_logprobs: Tensor | None,
    generation_logprobs: Tensor | None,
    advantages: Tensor,
    counts_sequences: bool | None,
) -> Participation:
    """Apply exclusions, then the rules that drop whole sequences.

    Formulas, over the surviving tokens of a sequence: its error is the mean of exp|prev - generation|; it is rejected
    (KL term too) where that exceeds ``error_threshold``. Its actor term is dropped where surviving / response tokens
    is below ``min_support_fraction``, or (OPSM, DeepSeek-V3.2 2025) where the mean advantage is negative and the mean
    of prev - curr exceeds ``opsm_threshold``. Nothing here carries gradient.

    Args:
        valid: bool per token, response & sample mask.
        excluded: from :func:`exclusions`.
        layout: sequences and ranks.
        rules: the thresholds.
        curr_logprobs, prev_logprobs, generation_logprobs, advantages: raw, per token. None where no rule reads it.
        counts_sequences: see :func:`megatron_support.loss.actor_loss`.
    """
    survives = valid if excluded.tokens is None else valid ^ excluded.tokens
    columns = {"valid": sequence_counts(valid, layout), "survives": sequence_counts(survives, layout)}
    read: dict[str, Tensor] = {}
    if rules.error_threshold is not None:
        assert prev_logprobs is not None and generation_logprobs is not None
        read["error"] = (prev_logprobs - generation_logprobs).abs().exp()
    if rules.opsm_threshold is not None:
        assert prev_logprobs is not None
        read |= {"divergence": prev_logprobs - curr_logprobs, "advantage": advantages}
    if layout.sequence_sum is not None and counts_sequences is None:
        read["key"] = curr_logprobs
    columns |= {name: layout.local_sums(select(survives, values).double()) for name, values in read.items()}
    totals = _totals(columns, layout)
    rejected, dropped = _leaving(totals, rules)

    gone = rejected if dropped is None else dropped if rejected is None else dropped | rejected
    kl_mask, kl_counts = valid, totals["valid"]
    if rejected is not None:
        kl_mask = valid & ~layout.to_tokens(rejected)
        kl_counts = torch.where(rejected, 0.0, kl_counts)
    actor_mask, actor_counts, local_actor_counts = survives, totals["survives"], columns["survives"]
    if gone is not None:
        actor_mask = survives & ~layout.to_tokens(gone)
        actor_counts = torch.where(gone, 0.0, actor_counts)
        local_actor_counts = torch.where(gone, 0.0, local_actor_counts)
    # sums of counts per sequence: counting a mask again costs a pass over the tokens
    valid_tokens = columns["valid"].sum().long()
    return Participation(
        kl_mask=kl_mask,
        actor_mask=actor_mask,
        survives=survives,
        excluded=excluded,
        valid_counts=totals["valid"],
        kl_counts=kl_counts,
        actor_counts=actor_counts,
        valid_tokens=valid_tokens,
        actor_tokens=local_actor_counts.sum().long(),
        excluded_tokens=valid_tokens - columns["survives"].sum().long(),
        owned=_owned(columns, totals, layout, counts_sequences),
        rejected=rejected,
        dropped=dropped,
    )


def _leaving(totals: dict[str, Tensor], rules: DropRules) -> tuple[Tensor | None, Tensor | None]:
    """(rejected, dropped), bool ``[sequences]`` that exclude each other; None where no such rule is on."""
    count = totals["survives"]
    divisor = torch.where(count > 0, count, 1.0)
    rejected = dropped = None
    if rules.error_threshold is not None:
        # Written so that a NaN mean is over the threshold.
        within = totals["error"] / divisor <= rules.error_threshold
        rejected = ~within & (count > 0)
    if rules.min_support_fraction > 0:
        dropped = (totals["valid"] > 0) & (count < rules.min_support_fraction * totals["valid"])
    if rules.opsm_threshold is not None:
        far = (totals["advantage"] < 0) & (totals["divergence"] / divisor > rules.opsm_threshold)
        dropped = far if dropped is None else dropped | far
    if dropped is not None and rejected is not None:
        dropped = dropped & ~rejected
    return rejected, dropped


def _totals(columns: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """All columns over the context-parallel ranks in one sum."""
    if layout.sequence_sum is None:
        return columns
    summed = layout.totals(torch.stack(list(columns.values()), dim=-1))
    return dict(zip(columns, summed.unbind(-1), strict=True))


def _owned(
    columns: dict[str, Tensor], totals: dict[str, Tensor], layout: Layout, counts_sequences: bool | None
) -> Tensor | None:
    """The sequences that this rank counts. Sums alone elect one of two ranks: the one with more of the sequence's
    tokens, then the one with the larger sum of log-probabilities."""
    if layout.sequence_sum is None or counts_sequences is True:
        return None
    mine, both = columns["valid"], totals["valid"]
    if counts_sequences is False:
        return torch.zeros_like(mine, dtype=torch.bool)
    tie = (2 * mine == both) & (2 * columns["key"] > totals["key"])
    return (2 * mine > both) | tie
