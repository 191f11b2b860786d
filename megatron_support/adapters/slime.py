"""slime: its custom loss, TIS and advantage functions, and the log-probability pass that feeds them.

slime looks functions up by path::

    --loss-type custom_loss --custom-loss-function-path megatron_support.adapters.slime.policy_loss
    --custom-megatron-init-path megatron_support.adapters.slime.init

Alignment: per-sample lists hold response tokens; a context-parallel rank holds those of its two zigzag chunks, chunk
by chunk. What slime does to the loss afterwards is undone by nothing here: a sum over this rank's samples (or tokens)
is what it expects.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import (
    AdapterSettings,
    global_vocab_size,
    host_metrics,
    load_settings,
    merged_loss,
    raise_faults,
    refuse_survivors,
    running_groups,
    sampling_params,
)
from megatron_support.adapters.hooks import Hook, Hooks, HostAdapter, host_module
from megatron_support.advantages import gae_advantages, kl_in_reward, outside_support, reinforce_pp_advantages
from megatron_support.config.loss import ActorLossConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.distributed.sequence_sum import sum_over_group
from megatron_support.errors import ConfigurationError
from megatron_support.loss import actor_loss
from megatron_support.loss.correction import correct
from megatron_support.loss.layout import Layout
from megatron_support.support import support_logprobs
from megatron_support.types import LossOutput, RolloutSupport, SamplingParams, TokenLogprobs

LOSS_PATH = "megatron_support.adapters.slime.policy_loss"
_KL_TYPES: dict[str, dict[str, Any]] = {
    "k1": {"type": "k1", "output_clamp": None},
    "k2": {"type": "k2", "output_clamp": None},
    "k3": {"type": "k3", "output_clamp": None},
    "low_var_kl": {"type": "k3", "output_clamp": 10.0},
}


@dataclass(frozen=True, kw_only=True)
class LocalTokens:
    """Response tokens of a microbatch on this rank, R in all, in slime's order."""

    rows: Tensor
    """int64 ``[R]``, which row of the logits predicts each."""
    targets: Tensor
    """int64 ``[T]``, by row; -1 where a row predicts no response token."""
    sequence_ids: Tensor
    """int64 ``[R]``, sample of each."""
    index: Tensor
    """int64 ``[R]``, position of each in its response."""
    counts: tuple[int, ...]
    """Tokens of each sample here."""

    def cut(self, per_response: Sequence[Tensor]) -> Tensor:
        """``[R]`` from one tensor per sample over its whole response."""
        starts = [0]
        for values in per_response:
            starts.append(starts[-1] + len(values))
        offsets = torch.tensor(starts[:-1], device=self.index.device)
        return torch.cat(list(per_response)).to(self.index.device)[offsets[self.sequence_ids] + self.index]


def local_tokens(
    tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    num_rows: int,
    groups: ParallelGroups,
) -> LocalTokens:
    """Where the response tokens of each sample are in this rank's logits.

    Without context parallelism samples lie end to end. With C ranks each sample is padded to 2C chunks, of which rank
    r holds r and 2C - 1 - r. Row p of a sample predicts token p + 1.

    Args:
        tokens: prompt and response of each sample.
        total_lengths, response_lengths: their lengths.
        num_rows: rows of the logits, padding included.
        groups: the ranks' layout.
    """
    device = tokens[0].device
    size, rank = groups.context_size, groups.context_rank
    rows, ids, index, targets = [], [], [], torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    start = 0
    for sample, (row, total, response) in enumerate(zip(tokens, total_lengths, response_lengths, strict=True)):
        if size == 1:
            positions = torch.arange(total, device=device)
        else:
            chunk = -(-total // (2 * size))
            first = torch.arange(chunk, device=device)
            positions = torch.cat([first + rank * chunk, first + (2 * size - 1 - rank) * chunk])
        predicts = (positions >= total - response - 1) & (positions >= 0) & (positions < total - 1)
        here = predicts.nonzero().flatten()
        targets[start + here] = row[positions[here] + 1]
        rows.append(start + here)
        ids.append(torch.full_like(here, sample))
        index.append(positions[here] + 1 - (total - response))
        start += positions.numel()
    return LocalTokens(
        rows=torch.cat(rows),
        targets=targets,
        sequence_ids=torch.cat(ids),
        index=torch.cat(index),
        counts=tuple(len(row) for row in rows),
    )


def replayed_support(
    local: LocalTokens, token_ids: Sequence[Any], offsets: Sequence[Any], num_rows: int
) -> RolloutSupport:
    """slime's rollout top-p sets (CSR per sample over its response) by row of the logits.

    Args:
        local: the microbatch's tokens.
        token_ids, offsets: per sample, ids ``[N]`` and offsets ``[response + 1]``, lists or tensors.
        num_rows: rows of the logits.
    """
    device = local.rows.device
    ids = [torch.as_tensor(value, dtype=torch.int64, device=device) for value in token_ids]
    bounds = [torch.as_tensor(value, dtype=torch.int64, device=device) for value in offsets]
    lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
    lengths[local.rows] = local.cut([bound.diff() for bound in bounds])
    bases = torch.tensor([0, *[len(value) for value in ids[:-1]]], device=device).cumsum(0)
    begins = local.cut([bound[:-1] for bound in bounds]) + bases[local.sequence_ids]
    whole = torch.cat(ids)
    row_begins = torch.zeros(num_rows, dtype=torch.int64, device=device)
    row_begins[local.rows] = begins
    ends = lengths.cumsum(0)
    take = torch.arange(int(ends[-1]), device=device) + torch.repeat_interleave(row_begins - (ends - lengths), lengths)
    return RolloutSupport(whole[take], torch.cat([ends.new_zeros(1), ends]))


def response_logprobs(
    args: Namespace,
    batch: Mapping[str, Any],
    logits: Tensor,
    local: LocalTokens,
    *,
    groups: ParallelGroups,
    settings: AdapterSettings,
    filtered: bool = True,
    entropy: bool = False,
    inplace_backward: bool = False,
) -> tuple[TokenLogprobs, bool]:
    """Log-probabilities ``[R]`` of the response tokens, and whether a token can be outside the support.

    The engine's recorded top-p sets are replayed where the batch has them; else ``rollout_top_k`` and
    ``rollout_top_p`` are recomputed from the logits.

    Args:
        args: slime's.
        batch: the microbatch.
        logits: ``[1, T, V/TP]``.
        local: its response tokens.
        groups, settings: this process's.
        filtered: False for the temperature alone (reference and teacher).
        entropy: whether to compute it.
        inplace_backward: whether the gradient may overwrite the logits.
    """
    temperature = float(getattr(args, "rollout_temperature", 1.0))
    sampling = SamplingParams(temperature)
    support = None
    ids, offsets = batch.get("rollout_top_p_token_ids"), batch.get("rollout_top_p_token_offsets")
    if filtered and ids is not None and offsets is not None:
        support = replayed_support(local, ids, offsets, logits.shape[1])
    elif filtered and settings.sampling is not None:
        sampling = sampling_params(settings.sampling)
    elif filtered:
        top_k = getattr(args, "rollout_top_k", -1)
        sampling = SamplingParams(temperature, top_k if top_k > 0 else None, float(getattr(args, "rollout_top_p", 1.0)))
    values = support_logprobs(
        logits.squeeze(0),
        local.targets,
        sampling,
        vocab_size=global_vocab_size(logits.shape[-1], groups, settings.vocab_size, getattr(args, "vocab_size", None)),
        tp_group=groups.tensor,
        support=support,
        entropy=entropy,
        ties=settings.logprobs.ties,
        chunk_size=settings.logprobs.chunk_size,
        inplace_backward=inplace_backward,
    )
    taken = TokenLogprobs(
        filtered=values.filtered[local.rows],
        unfiltered=values.unfiltered[local.rows],
        entropy=None if values.entropy is None else values.entropy[local.rows],
        in_support=values.in_support[local.rows],
    )
    return taken, support is not None or sampling.filters


def loss_config(args: Namespace, settings: AdapterSettings) -> ActorLossConfig:
    """slime's loss options as our configuration, checked against what slime divides by.

    Raises:
        ConfigurationError: an option has no counterpart, or the aggregation does not fit ``calculate_per_token_loss``.
    """
    if getattr(args, "use_unbiased_kl", False) and settings.loss is None:
        raise ConfigurationError(
            "use_unbiased_kl weights the KL term by current / previous and has no counterpart, got True; drop it, or "
            "set loss.kl.on_policy in the settings file, which weights by current / generation"
        )
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    clip = {"clip_low": float(args.eps_clip), "clip_high": float(high)}
    if args.advantage_estimator == "cispo":
        surrogate: dict[str, Any] = {"type": "cispo", **clip}
    else:
        surrogate = {"type": "ppo_clip", "dual_clip": args.eps_clip_c, **clip}
    described: dict[str, Any] = {
        "surrogate": surrogate,
        "ratio_level": "sequence" if args.advantage_estimator == "gspo" else "token",
        "aggregation": {"type": "token_mean" if args.calculate_per_token_loss else "sequence_mean"},
        "entropy_coef": float(args.entropy_coef),
    }
    if args.use_kl_loss and args.kl_loss_coef:
        described["kl"] = {"coef": float(args.kl_loss_coef), "input_clamp": None, **_KL_TYPES[args.kl_loss_type]}
    if args.use_tis:
        described["correction"] = {"type": "tis", "low": float(args.tis_clip_low), "high": float(args.tis_clip)}
    if args.use_opsm:
        described["sequence_mask"] = {"type": "opsm", "threshold": float(args.opsm_delta)}
    config = merged_loss(settings, described)
    refuse_survivors(config, "slime")
    fits = "tokens" if args.calculate_per_token_loss else "sequences"
    if config.denominator != fits:
        raise ConfigurationError(
            f"loss.aggregation must divide by {fits} with calculate_per_token_loss={args.calculate_per_token_loss}, "
            f"which slime does itself, got {config.aggregation.type!r}; change one of them"
        )
    if config.positive_nll_coef > 0:
        raise ConfigurationError(
            f"loss.positive_nll_coef must be 0 in slime, whose batch carries no rewards, got {config.positive_nll_coef}"
        )
    return config


def policy_loss(
    args: Namespace,
    batch: Mapping[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's ``--custom-loss-function-path``: the actor loss of one microbatch.

    The loss is the sum that slime divides: over samples of their token means, times the share of the sample in its
    rollout's ``rollout_mask_sums`` (1 where a rollout is one sample), or over tokens with ``calculate_per_token_loss``.

    Args:
        args: slime's options.
        batch: ``unconcat_tokens``, ``total_lengths``, ``response_lengths``, ``loss_masks``, ``advantages``, and
            ``log_probs``, ``rollout_log_probs``, ``ref_log_probs``, ``rollout_top_p_token_*`` where there are any.
        logits: ``[1, T, V/TP]``.
        sum_of_sample_mean: slime's reducer, used for what is logged.

    Returns:
        The loss and what slime logs.
    """
    settings, groups = load_settings(), running_groups()
    _refuse_allgather(args, groups)
    config = loss_config(args, settings)
    local = local_tokens(
        batch["unconcat_tokens"],
        batch["total_lengths"],
        batch["response_lengths"],
        num_rows=logits.shape[1],
        groups=groups,
    )
    values, filtered = response_logprobs(
        args, batch, logits, local, groups=groups, settings=settings, entropy=config.entropy_coef > 0
    )
    generation = _concatenated(batch, "rollout_log_probs")
    previous = generation if args.use_rollout_logprobs else _concatenated(batch, "log_probs")
    tensors: dict[str, Any] = {
        "curr_logprobs": values.filtered,
        "curr_logprobs_unfiltered": values.unfiltered,
        "entropy": values.entropy,
        "prev_logprobs": values.filtered.detach() if previous is None else previous,
        "generation_logprobs": generation,
        "reference_logprobs": _concatenated(batch, "ref_log_probs"),
        "advantages": torch.cat(list(batch["advantages"])),
        "response_mask": local.cut(batch["loss_masks"]),
        "filtered": filtered,
    }
    sample_ids = local.sequence_ids
    samples = len(local.counts)
    every = torch.ones(samples, dtype=torch.bool, device=logits.device)
    raise_faults(config, **tensors, sequence_ids=sample_ids, sample_mask=every)
    loss: Tensor = logits.new_zeros(()) + 0 * values.unfiltered.sum()  # attached also where nothing is here
    outputs = []
    for chosen, share in _shares(args, config, batch):
        mask = every if chosen is None else torch.arange(samples, device=logits.device) == chosen
        output = actor_loss(
            config,
            **tensors,
            sequence_ids=sample_ids,
            sample_mask=mask,
            global_valid_tokens=1,
            global_valid_sequences=1,
            sequence_sum=None if groups.context is None else partial(sum_over_group, group=groups.context),
            counts_sequences=None if groups.context is None else groups.context_rank == 0,
        )
        loss = loss + share * output.loss
        outputs.append(output)
    return loss, _logged(args, tensors, loss, outputs, sum_of_sample_mean)


def _shares(args: Namespace, config: ActorLossConfig, batch: Mapping[str, Any]) -> list[tuple[int | None, float]]:
    """(sample, weight) of each part of the loss; one part for all samples where every weight is 1."""
    if args.calculate_per_token_loss or config.aggregation.type != "sequence_mean":
        return [(None, 1.0)]
    own = torch.stack([mask.sum().double() for mask in batch["loss_masks"]]).cpu()
    whole = torch.stack([torch.as_tensor(total).double().cpu() for total in batch["rollout_mask_sums"]])
    share = own / whole.clamp(min=1)
    if bool(((share == 1) | (own == 0)).all()):
        return [(None, 1.0)]
    return list(enumerate(share.tolist()))


def _logged(
    args: Namespace,
    tensors: Mapping[str, Any],
    loss: Tensor,
    outputs: Sequence[LossOutput],
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Detached sums in slime's own space: its reducer for tokens, our numerators where slime divides by their count."""
    with torch.no_grad():
        excluded = torch.zeros_like(tensors["curr_logprobs"], dtype=torch.bool)
        for name in ("curr_logprobs", "prev_logprobs", "generation_logprobs"):
            if tensors[name] is not None:
                excluded = excluded | torch.isneginf(tensors[name])

        def reduced(values: Tensor) -> Tensor:
            return torch.as_tensor(sum_of_sample_mean(torch.where(excluded, 0.0, values.float())), device=loss.device)

        previous, generation = tensors["prev_logprobs"], tensors["generation_logprobs"]
        logged = {
            "loss": loss.detach().clone(),
            "policy_support_excluded_share": torch.as_tensor(sum_of_sample_mean(excluded.float()), device=loss.device),
            "ppo_kl": reduced(previous - tensors["curr_logprobs"].detach()),
        }
        if generation is not None:
            logged["train_rollout_logprob_abs_diff"] = reduced((previous - generation).abs())
    totals: dict[str, Tensor] = {}
    for output in outputs:
        ours = host_metrics(output.metrics)
        for name, total in (ours.tokens if args.calculate_per_token_loss else ours.sequences).items():
            totals[name] = totals[name] + total if name in totals else total
    return logged | {name: total.to(loss.dtype) for name, total in totals.items()}


def log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Any] | None = None,
    top_p_token_offsets: Sequence[Any] | None = None,
    filtered: bool = True,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """slime's log-probability callback, with -inf kept at tokens outside the support.

    Args:
        logits: ``[1, T, V/TP]``.
        filtered: False for reference and teacher values.
        args, unconcat_tokens, total_lengths, response_lengths, with_entropy, non_loss_data, top_p_token_ids,
            top_p_token_offsets: as slime passes them.

    Returns:
        What slime collects: an empty tensor and lists per sample, ``log_probs`` and ``entropy`` where asked for.
    """
    settings, groups = load_settings(), running_groups()
    _refuse_allgather(args, groups)
    local = local_tokens(unconcat_tokens, total_lengths, response_lengths, num_rows=logits.shape[1], groups=groups)
    batch = {"rollout_top_p_token_ids": top_p_token_ids, "rollout_top_p_token_offsets": top_p_token_offsets}
    values, _ = response_logprobs(
        args, batch, logits, local, groups=groups, settings=settings, filtered=filtered, entropy=with_entropy
    )
    result = {"log_probs": list(values.filtered.split(local.counts))}
    if values.entropy is not None:
        result["entropy"] = list(values.entropy.split(local.counts))
    return torch.empty((0,), device=logits.device), result


def tis(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **rest: Any,
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """slime's ``--custom-tis-function-path``: truncated importance sampling that excludes tokens outside a support.

    For slime's own ``policy_loss``, whose current log-probabilities are finite. A token that is -inf for the engine or
    the trainer has loss and weight 0; slime's denominators stay.

    Args:
        args: ``tis_clip_low`` and ``tis_clip`` bound the weight.
        pg_loss: ``[R]``.
        train_log_probs, rollout_log_probs: per sample.
        loss_masks: per sample; returned as they are.
        rest: not read.
    """
    previous, generation = torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs))
    lost = torch.isneginf(previous) | torch.isneginf(generation)
    log_weight = torch.where(lost, 0.0, previous - generation)
    layout = Layout(shape=log_weight.shape, num_sequences=1, sequence_ids=torch.zeros_like(lost, dtype=torch.int64))
    plain = log_weight.clamp(-20.0, 20.0).exp()
    weights = correct(
        log_weight,
        log_weight.new_full((1,), log_weight.numel(), dtype=torch.float64),
        layout,
        kind="tis",
        per_sequence=False,
        low=float(args.tis_clip_low),
        high=float(args.tis_clip),
    ).weights
    metrics = {
        "tis": torch.where(lost, 0.0, plain),
        "tis_clipfrac": torch.where(lost, 0.0, (weights != plain).to(plain.dtype)),
        "tis_abs": torch.where(lost, 0.0, (plain - 1).abs()),
        "policy_support_excluded_share": lost.to(plain.dtype),
    }
    return torch.where(lost, 0.0, pg_loss) * weights, loss_masks, {k: v.detach() for k, v in metrics.items()}


def advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """slime's ``--custom-advantage-function-path``: its estimators, with the KL term 0 outside the support.

    A token that the previous pass found outside the support keeps its reward and value terms. Fills ``advantages`` and
    ``returns`` per sample.

    Raises:
        ConfigurationError: an estimator that follows a sequence, under context parallelism.
    """
    groups = running_groups()
    previous = rollout_data.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
    like = previous or rollout_data.get("rollout_log_probs") or rollout_data["values"]
    sizes = [len(values) for values in like]
    device = like[0].device
    rewards = torch.as_tensor(rollout_data["rewards"], dtype=torch.float32, device=device)
    ids = torch.repeat_interleave(torch.arange(len(sizes), device=device), torch.tensor(sizes, device=device))
    estimator = args.advantage_estimator
    if estimator in ("grpo", "gspo", "cispo"):
        _store(rollout_data, rewards[ids], rewards[ids], sizes)
        return
    if groups.context is not None:
        raise ConfigurationError(
            f"advantage_estimator {estimator!r} follows whole sequences and needs context_parallel_size 1 here, got "
            f"{groups.context_size}; use grpo, gspo or cispo, or slime's own estimator"
        )
    mask = torch.cat(list(rollout_data["loss_masks"])).to(device)
    penalty = torch.zeros(len(ids), device=device)
    if args.kl_coef and previous:
        old = torch.cat(list(previous))
        outside = outside_support(old, mask != 0, True, ids)
        kind = _KL_TYPES[args.kl_loss_type]
        reference = torch.cat(list(rollout_data["ref_log_probs"]))
        penalty = kl_in_reward(old, reference, mask != 0, outside, coef=args.kl_coef, kind=kind["type"]).float()
    if estimator == "reinforce_plus_plus":
        found = reinforce_pp_advantages(rewards, mask, ids, token_penalty=penalty, gamma=args.gamma, whiten=False)
        _store(rollout_data, found, found, sizes)
    elif estimator == "reinforce_plus_plus_baseline":
        found = rewards[ids] - penalty
        _store(rollout_data, found, found, sizes)
    else:
        gae = gae_advantages(
            rewards,
            torch.cat(list(rollout_data["values"])),
            mask,
            ids,
            token_penalty=penalty,
            gamma=args.gamma,
            lam=args.lambd,
            whiten=False,
        )
        _store(rollout_data, gae.advantages, gae.returns, sizes)


def _store(rollout_data: dict[str, Any], found: Tensor, returns: Tensor, sizes: Sequence[int]) -> None:
    rollout_data["advantages"] = list(found.split(list(sizes)))
    rollout_data["returns"] = list(returns.split(list(sizes)))


def _concatenated(batch: Mapping[str, Any], name: str) -> Tensor | None:
    values = batch.get(name)
    return torch.cat(list(values)) if values else None


def _refuse_allgather(args: Namespace, groups: ParallelGroups) -> None:
    if groups.context is not None and getattr(args, "allgather_cp", False):
        raise ConfigurationError(
            "allgather_cp must be off, got True: tokens are expected in zigzag chunks; turn it off"
        )


def init(args: Namespace) -> None:
    """slime's ``--custom-megatron-init-path``: hook the log-probability pass of this training process."""
    from megatron_support.adapters.registry import register

    register("slime")


def _hook_logprobs(hooks: Hooks) -> None:
    """Reference and teacher passes get unfiltered values, the actor's own keep -inf; value models are left alone."""
    actor = host_module("slime.backends.megatron_utils.actor")
    theirs = host_module("slime.backends.megatron_utils.loss")
    lookup = vars(theirs)

    def forward_only(f: Any, args: Namespace, *rest: Any, store_prefix: str = "", **options: Any) -> Any:
        ours = getattr(args, "custom_loss_function_path", None) == LOSS_PATH
        if ours and f is lookup["get_log_probs_and_entropy"]:
            f = partial(log_probs_and_entropy, filtered=store_prefix == "")
            options["use_rollout_top_p_replay"] = store_prefix == "" and args.rollout_top_p != 1.0
        return original(f, args, *rest, store_prefix=store_prefix, **options)

    original = hooks.replace(actor, "forward_only", forward_only)


HOST = HostAdapter(
    name="slime",
    module="slime",
    distributions=("slime",),
    hooks=(Hook(what="log-probability pass", apply=_hook_logprobs, needs=("slime.backends", "megatron.core")),),
    guide="examples/slime/README.md",
)
