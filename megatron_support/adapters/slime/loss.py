"""slime's custom loss and TIS functions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import host_metrics, load_settings, raise_faults, running_groups
from megatron_support.adapters.slime.logprobs import response_logprobs
from megatron_support.adapters.slime.options import loss_config, refuse_allgather
from megatron_support.adapters.slime.tokens import local_tokens
from megatron_support.config.loss import ActorLossConfig
from megatron_support.distributed.sequence_sum import sum_over_group
from megatron_support.loss import actor_loss
from megatron_support.loss.correction import correct
from megatron_support.loss.layout import Layout
from megatron_support.types import LossOutput


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
    refuse_allgather(args, groups)
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
            trainer = tensors["curr_logprobs"].detach() if args.use_rollout_logprobs else previous
            logged["train_rollout_logprob_abs_diff"] = reduced((trainer - generation).abs())
    totals: dict[str, Tensor] = {}
    for output in outputs:
        ours = host_metrics(output.metrics)
        for name, total in (ours.tokens if args.calculate_per_token_loss else ours.sequences).items():
            totals[name] = totals[name] + total if name in totals else total
    return logged | {name: total.to(loss.dtype) for name, total in totals.items()}


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


def _concatenated(batch: Mapping[str, Any], name: str) -> Tensor | None:
    values = batch.get(name)
    return torch.cat(list(values)) if values else None
