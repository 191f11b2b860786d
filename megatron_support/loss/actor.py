"""The actor loss: masks once, a surrogate, a correction, a KL term, one division."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_support.config.loss import ActorLossConfig
from megatron_support.errors import ConfigurationError
from megatron_support.loss.aggregate import AggregationType, Count, Counts, at_least_one, denominator, local_sum
from megatron_support.loss.correction import CorrectionWeights, behaviour_weights, correct
from megatron_support.loss.diagnostics import DiagnosticTokens, token_diagnostics, weight_metrics
from megatron_support.loss.inputs import TokenInputs, token_inputs
from megatron_support.loss.kl import reference_kl
from megatron_support.loss.layout import SequenceSum
from megatron_support.loss.masks import Selection, count, exclusions, poison, select, value_range
from megatron_support.loss.participation import DropRules, Participation, participation
from megatron_support.loss.ratio import level_log_ratio, sequence_means
from megatron_support.loss.surrogates import SurrogateInputs, SurrogateOutput, surrogate_loss
from megatron_support.metrics import Mean, Metric, MetricSet, Sum
from megatron_support.types import LossOutput


def actor_loss(
    config: ActorLossConfig,
    *,
    curr_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    prev_logprobs: Tensor | None = None,
    generation_logprobs: Tensor | None = None,
    correction_weights: Tensor | None = None,
    global_positive_tokens: Count | None = None,
    sample_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    curr_logprobs_unfiltered: Tensor | None = None,
    entropy: Tensor | None = None,
    rewards: Tensor | None = None,
    filtered: bool | Tensor = True,
    global_valid_tokens: Count | None = None,
    global_valid_sequences: Count | None = None,
    sequence_sum: SequenceSum | None = None,
    counts_sequences: bool | None = None,
    metrics: Literal["full", "minimal"] = "full",
) -> LossOutput:
    """The actor loss of one microbatch, divided by global counts.

    Formula: ``(sum w_t c_t l_t + coef sum w_t KL_t - entropy_coef sum w_t H_t) / N + nll_coef NLL``: l the surrogate,
    c the behaviour-policy correction, w the aggregation's token weights, N one global count. See README.md beside
    this file for every variant, denominator, and what happens to an excluded token in each term.

    A response token whose current, previous or generation log-probability is -inf where ``filtered`` is True is
    excluded from every term but the KL. A NaN or infinity elsewhere at a token that takes part makes the loss NaN
    (an advantage or entropy, NaN or infinite); :func:`find_faults` says where it is. Masked positions may hold
    anything. Nothing here synchronises the host.

    Args:
        config: what to compute.
        curr_logprobs: ``[B, S]`` (a row is a sequence), or any shape of T tokens with ``sequence_ids``; raw, -inf
            outside the support. Only this, curr_logprobs_unfiltered and entropy get a gradient.
        advantages: per token.
        response_mask: per token, any dtype.
        prev_logprobs: per token, the trainer's before the step. on_policy ignores it.
        generation_logprobs: per token, the inference engine's.
        correction_weights: per token, the host's own weights in place of ``config.correction``.
        global_positive_tokens: denominator of the positive-sample NLL. None: counted from this batch.
        sample_mask: ``[sequences]``; a False sequence enters no term.
        sequence_ids: int64 per token, index of its sequence.
        reference_logprobs: per token, unfiltered. Read by the KL term.
        curr_logprobs_unfiltered: per token. Read by the KL term; needed where ``filtered``.
        entropy: per token, of the whole vocabulary, in nats. Read by the entropy bonus.
        rewards: ``[sequences]``. Read by the positive-sample NLL.
        filtered: whether -inf means "outside the support": one bool, per sequence, or per token.
        global_valid_tokens, global_valid_sequences: denominators. None: counted from this batch; 1: leave sums.
        sequence_sum: sums ``[sequences]`` or ``[sequences, K]`` over context-parallel ranks, differentiably.
        counts_sequences: with ``sequence_sum``, True on the one rank of the context-parallel group that counts its
            sequences, False on the others. None elects the rank that holds most of a sequence's response tokens, which
            is one rank for a group of two; larger groups pass it.
        metrics: full, or minimal for no diagnostics.

    Returns:
        Loss (scalar, attached to the graph), metrics and counts.

    Raises:
        ConfigurationError: a tensor that a term reads is missing, or has the wrong shape.
    """
    if metrics not in ("full", "minimal"):
        raise ConfigurationError(f"metrics must be 'full' or 'minimal', got {metrics!r}; use one of them")
    inputs = token_inputs(
        curr_logprobs=curr_logprobs,
        response_mask=response_mask,
        advantages=advantages,
        sample_mask=sample_mask,
        sequence_ids=sequence_ids,
        filtered=filtered,
        rewards=rewards,
        sequence_sum=sequence_sum,
        prev_logprobs=None if config.surrogate.type == "on_policy" else prev_logprobs,
        generation_logprobs=generation_logprobs,
        reference_logprobs=reference_logprobs if config.needs_reference else None,
        curr_logprobs_unfiltered=curr_logprobs_unfiltered if config.needs_reference else None,
        entropy=entropy if config.entropy_coef > 0 else None,
        correction_weights=correction_weights,
    )
    _check_present(config, inputs)
    part = _participation(config, inputs, counts_sequences)
    survivors = config.normalization == "survivors"
    counts = Counts(
        valid_tokens=part.valid_tokens,
        valid_sequences=part.count_sequences(part.valid_counts > 0),
        surviving_tokens=part.actor_tokens,
        surviving_sequences=part.count_sequences(part.actor_counts > 0),
    )
    divisor = denominator(
        counts,
        kind=config.aggregation.type,
        survivors=survivors,
        global_valid_tokens=global_valid_tokens,
        global_valid_sequences=global_valid_sequences,
    )
    tokens = _actor_tokens(config, inputs, part)
    surrogate = _surrogate(config, inputs, part, tokens)
    correction = _correction(config, inputs, part, tokens)
    kl = _kl(config, inputs, part)
    loss = _numerator(config, inputs, part, tokens.selection, surrogate, correction, kl) / divisor + tokens.fault
    positive = _positive_nll(inputs, part, survivors) if config.positive_nll_coef > 0 else None
    if positive is not None:
        given = positive.own_count if global_positive_tokens is None else global_positive_tokens
        loss = loss + config.positive_nll_coef * (positive.total / at_least_one(given))
    if kl is not None:
        loss = loss + kl.fault
    with torch.no_grad():
        reported = _term_metrics(config, inputs, part, counts, kl, positive)
        if metrics == "full":
            reported |= _diagnostics(config, inputs, part, tokens, counts, surrogate, correction)
    return LossOutput(
        loss=loss,
        metrics=MetricSet(reported),
        valid_tokens=counts.valid_tokens,
        valid_sequences=counts.valid_sequences,
        surviving_tokens=counts.surviving_tokens,
        surviving_sequences=counts.surviving_sequences,
    )


def _check_present(config: ActorLossConfig, inputs: TokenInputs) -> None:
    """Raise where a tensor that a term reads is missing."""
    reads_unfiltered = config.needs_reference and inputs.filtered is not False
    needed = {
        "prev_logprobs": (config.needs_previous, "the surrogate, correction, sequence mask or error check"),
        "generation_logprobs": (config.needs_generation, "the correction, error check or on-policy KL"),
        "reference_logprobs": (config.needs_reference, "the KL term"),
        "curr_logprobs_unfiltered": (reads_unfiltered, "the KL term under a sampling filter"),
        "entropy": (config.entropy_coef > 0, "the entropy bonus"),
        "rewards": (config.positive_nll_coef > 0, "the positive-sample NLL"),
    }
    for name, (reads, reader) in needed.items():
        if reads and getattr(inputs, name) is None:
            raise ConfigurationError(
                f"{name} is read by {reader} and must be given, got None; pass it or turn that off"
            )
    if config.correction is not None and inputs.correction_weights is not None:
        raise ConfigurationError(
            f"correction_weights must be None with loss.correction {config.correction.type!r}, got a tensor; "
            "set correction to null to use your own weights"
        )


def _participation(config: ActorLossConfig, inputs: TokenInputs, counts_sequences: bool | None) -> Participation:
    excluded = exclusions(
        inputs.valid, inputs.filtered, inputs.curr_logprobs, inputs.prev_logprobs, inputs.generation_logprobs
    )
    return participation(
        inputs.valid,
        excluded,
        inputs.layout,
        rules=DropRules(
            min_support_fraction=config.min_support_fraction,
            error_threshold=config.sequence_error_threshold,
            opsm_threshold=None if config.sequence_mask is None else config.sequence_mask.threshold,
        ),
        curr_logprobs=inputs.curr_logprobs.detach(),
        prev_logprobs=inputs.previous,
        generation_logprobs=inputs.generation_logprobs,
        advantages=inputs.advantages,
        counts_sequences=counts_sequences,
    )


@dataclass(frozen=True, kw_only=True)
class _ActorTokens:
    """Sanitised under the actor mask: 0 at tokens that do not take part."""

    selection: Selection
    log_ratio: Tensor
    log_ratio_range: tuple[Tensor, Tensor]
    advantages: Tensor
    log_weight: Tensor | None
    """prev - generation, where that is given."""
    log_weight_range: tuple[Tensor, Tensor] | None
    fault: Tensor
    """0, or NaN where a log-probability that takes part is not finite."""


def _actor_tokens(config: ActorLossConfig, inputs: TokenInputs, part: Participation) -> _ActorTokens:
    selection = Selection(part.actor_mask)
    log_ratio = selection.difference(inputs.curr_logprobs, inputs.previous)
    ranges = [value_range(log_ratio)]
    log_weight = None
    if inputs.generation_logprobs is not None:
        log_weight = selection.difference(inputs.previous, inputs.generation_logprobs)
        ranges.append(value_range(log_weight))
    suspects = ranges
    if part.survives is not part.actor_mask:  # a fault in a sequence that was dropped is still a fault
        read = (
            inputs.previous,
            inputs.generation_logprobs,
            inputs.advantages,
            inputs.entropy,
            inputs.correction_weights,
        )
        whole = Selection(part.survives)
        suspects = [
            value_range(whole(values.detach())) for values in (inputs.curr_logprobs, *read) if values is not None
        ]
    return _ActorTokens(
        selection=selection,
        log_ratio=log_ratio,
        log_ratio_range=ranges[0],
        advantages=selection(inputs.advantages),
        log_weight=log_weight,
        log_weight_range=None if log_weight is None else ranges[1],
        fault=poison(*suspects),
    )


def _surrogate(
    config: ActorLossConfig, inputs: TokenInputs, part: Participation, tokens: _ActorTokens
) -> SurrogateOutput:
    layout, counts = inputs.layout, part.actor_counts

    def sequence_mean(values: Tensor) -> Tensor:
        return layout.to_tokens(sequence_means(values, counts, layout))

    log_ratio = level_log_ratio(tokens.log_ratio, counts, layout, config.ratio_level, tokens.log_ratio_range)
    return surrogate_loss(
        config.surrogate.type,
        SurrogateInputs(
            log_ratio=log_ratio,
            ratio=log_ratio.exp(),
            advantages=tokens.advantages,
            selection=tokens.selection,
            raw_curr_logprobs=inputs.curr_logprobs,
            raw_prev_logprobs=inputs.previous,
            sequence_mean=sequence_mean,
        ),
        config.surrogate.parameters,
    )


def _correction(
    config: ActorLossConfig, inputs: TokenInputs, part: Participation, tokens: _ActorTokens
) -> CorrectionWeights | None:
    """The weights that multiply the surrogate; None for none."""
    if inputs.correction_weights is not None:
        return CorrectionWeights(weights=tokens.selection(inputs.correction_weights))
    if config.correction is None:
        return None
    assert tokens.log_weight is not None
    return correct(
        tokens.log_weight,
        part.actor_counts,
        inputs.layout,
        kind=config.correction.type,
        per_sequence=config.ratio_level != "token",
        **config.correction.window,
    )


@dataclass(frozen=True, kw_only=True)
class _KL:
    values: Tensor
    """Per token, without the coefficient; 0 outside the KL mask."""
    fault: Tensor


def _kl(config: ActorLossConfig, inputs: TokenInputs, part: Participation) -> _KL | None:
    if config.kl is None or not config.needs_reference:
        return None
    given = inputs.curr_logprobs_unfiltered
    raw = inputs.curr_logprobs if given is None else given
    assert inputs.reference_logprobs is not None
    curr = select(part.kl_mask, raw)
    reference = select(part.kl_mask, inputs.reference_logprobs)
    generation = in_support = None
    if config.kl.on_policy:
        assert inputs.generation_logprobs is not None
        outside = part.excluded.by(inputs.generation_logprobs)
        in_support = None if outside is None else ~outside
        mask = part.kl_mask if in_support is None else part.kl_mask & in_support
        generation = select(mask, inputs.generation_logprobs)
    values = reference_kl(
        curr,
        reference,
        kind=config.kl.type,
        input_clamp=config.kl.input_clamp,
        output_clamp=config.kl.output_clamp,
        generation_logprobs=generation,
        generation_in_support=in_support,
    )
    # A fault in a sequence that was rejected is still a fault.
    whole = (
        curr.detach() - reference
        if part.rejected is None
        else select(inputs.valid, raw.detach() - inputs.reference_logprobs)
    )
    return _KL(values=select(part.kl_mask, values), fault=poison(value_range(whole)))


def _numerator(
    config: ActorLossConfig,
    inputs: TokenInputs,
    part: Participation,
    selection: Selection,
    surrogate: SurrogateOutput,
    correction: CorrectionWeights | None,
    kl: _KL | None,
) -> Tensor:
    """The local sum that the one global count divides."""
    aggregation = config.aggregation
    max_length = aggregation.max_length if aggregation.type == "dr_grpo" else None

    def aggregate(values: Tensor, counts: Tensor) -> Tensor:
        return local_sum(values, counts, inputs.layout, kind=aggregation.type, max_length=max_length)

    per_token = surrogate.loss if correction is None else surrogate.loss * correction.weights
    if not surrogate.zero_outside:
        per_token = selection(per_token)
    total = aggregate(per_token, part.actor_counts)
    if config.entropy_coef > 0:
        assert inputs.entropy is not None
        total = total - config.entropy_coef * aggregate(selection(inputs.entropy), part.actor_counts)
    if kl is not None and config.kl is not None:
        total = total + config.kl.coef * aggregate(kl.values, part.kl_counts)
    return total


@dataclass(frozen=True, kw_only=True)
class _PositiveNLL:
    """Over samples with a positive reward."""

    total: Tensor
    """Sum of -log p over surviving tokens."""
    counted: Tensor
    """Tokens before exclusion; after it under ``survivors``."""
    own_count: Tensor
    """What divides where no global count is given: ``counted``, but of all tokens where none survives."""


def _positive_nll(inputs: TokenInputs, part: Participation, survivors: bool) -> _PositiveNLL:
    assert inputs.rewards is not None
    positive = inputs.layout.to_tokens(inputs.rewards > 0)
    surviving = part.actor_mask & positive
    total = -select(surviving, inputs.curr_logprobs).sum()
    before = count(inputs.valid & positive)
    if not survivors:
        return _PositiveNLL(total=total, counted=before, own_count=before)
    after = count(surviving)
    return _PositiveNLL(total=total, counted=after, own_count=torch.where(after > 0, after, before))


def _term_metrics(
    config: ActorLossConfig,
    inputs: TokenInputs,
    part: Participation,
    counts: Counts,
    kl: _KL | None,
    positive: _PositiveNLL | None,
) -> dict[str, Metric]:
    """Counts and the terms that were computed anyway: the minimal set."""
    survivors = config.normalization == "survivors"
    num_tokens = counts.surviving_tokens if survivors else counts.valid_tokens
    num_sequences = counts.surviving_sequences if survivors else counts.valid_sequences
    metrics: dict[str, Metric] = {
        "policy_support_excluded_tokens": Sum(part.excluded_tokens),
        "num_valid_samples": Sum(counts.valid_sequences),
    }
    if part.dropped is not None:
        metrics["dropped_sequences"] = Sum(part.count_sequences(part.dropped))
    if part.rejected is not None:
        metrics["rejected_sequences"] = Sum(part.count_sequences(part.rejected))
    if kl is not None:
        by_sequence = config.aggregation.type == "sequence_mean"
        kind: AggregationType = "sequence_mean" if by_sequence else "token_mean"
        total = local_sum(kl.values.detach(), part.kl_counts, inputs.layout, kind=kind)
        metrics["kl_penalty"] = (
            Mean(total, num_sequences, per="sequence") if by_sequence else Mean(total, num_tokens, per="token")
        )
    if positive is not None:
        metrics["positive_nll_loss"] = Mean(positive.total.detach(), positive.counted, per="positive token")
    if inputs.entropy is not None and config.entropy_coef > 0:
        total = select(part.actor_mask, inputs.entropy.detach()).sum()
        metrics["entropy"] = Mean(total, num_tokens, per="token")
    return metrics


def _diagnostics(
    config: ActorLossConfig,
    inputs: TokenInputs,
    part: Participation,
    tokens: _ActorTokens,
    counts: Counts,
    surrogate: SurrogateOutput,
    correction: CorrectionWeights | None,
) -> dict[str, Metric]:
    """The full set; which names it has depends on the configuration and on which tensors are given, never on values."""
    survivors = config.normalization == "survivors"
    num_tokens = counts.surviving_tokens if survivors else counts.valid_tokens
    num_sequences = counts.surviving_sequences if survivors else counts.valid_sequences
    curr = inputs.curr_logprobs.detach()
    by_token = config.ratio_level == "token"
    metrics, weight_sum = token_diagnostics(
        DiagnosticTokens(
            mask=part.actor_mask,
            excluded=part.excluded.tokens,
            dropped=None if part.survives is part.actor_mask else part.survives ^ part.actor_mask,
            curr_logprobs=curr,
            prev_logprobs=inputs.previous,
            generation_logprobs=inputs.generation_logprobs,
            raw_advantages=inputs.advantages,
            advantages=tokens.advantages,
            actor_logprobs=None if tokens.log_weight is None else tokens.selection(curr),
            log_ratio=tokens.log_ratio.detach(),
            log_weight=tokens.log_weight,
            token_ratio=surrogate.importance_ratio if by_token else None,
            ratio=surrogate.ratio.detach(),
            clipped_ratio=None if surrogate.pessimistic is None else surrogate.pessimistic.clipped_ratio,
            clipped=surrogate.clipped,
            bounded=surrogate.bounded,
        ),
        num_tokens,
        log_ratio_range=tokens.log_ratio_range if by_token else None,
        log_weight_range=tokens.log_weight_range,
        window=surrogate.window,
        pessimistic=surrogate.pessimistic is not None,
        kl_type="k3" if config.kl is None else config.kl.type,
    )
    if correction is not None:
        return metrics | weight_metrics(correction, part, num_tokens, num_sequences)
    if weight_sum is None:
        return metrics
    if by_token:
        metrics["sampling_importance_ratio"] = Mean(weight_sum, num_tokens, per="token")
        return metrics
    assert tokens.log_weight is not None
    product = behaviour_weights(tokens.log_weight, inputs.layout, per_sequence=True)
    raw = CorrectionWeights(weights=inputs.layout.to_tokens(product), per_sequence=product)
    return metrics | weight_metrics(raw, part, num_tokens, num_sequences)
