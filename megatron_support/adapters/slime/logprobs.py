"""slime's log-probability pass: what its own callback returns, with -inf kept at tokens outside the support."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import (
    AdapterSettings,
    global_vocab_size,
    load_settings,
    running_groups,
    sampling_params,
)
from megatron_support.adapters.hooks import Hooks, host_module
from megatron_support.adapters.slime.options import refuse_allgather
from megatron_support.adapters.slime.tokens import LocalTokens, local_tokens, replayed_support
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.support import support_logprobs
from megatron_support.types import SamplingParams, TokenLogprobs

LOSS_PATH = "megatron_support.adapters.slime.policy_loss"


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
    refuse_allgather(args, groups)
    local = local_tokens(unconcat_tokens, total_lengths, response_lengths, num_rows=logits.shape[1], groups=groups)
    batch = {"rollout_top_p_token_ids": top_p_token_ids, "rollout_top_p_token_offsets": top_p_token_offsets}
    values, _ = response_logprobs(
        args, batch, logits, local, groups=groups, settings=settings, filtered=filtered, entropy=with_entropy
    )
    result = {"log_probs": list(values.filtered.split(local.counts))}
    if values.entropy is not None:
        result["entropy"] = list(values.entropy.split(local.counts))
    return torch.empty((0,), device=logits.device), result


def hook_logprobs(hooks: Hooks) -> None:
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
