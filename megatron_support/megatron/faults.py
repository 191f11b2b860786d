"""A log-probability that must be finite and is not stops every rank, with one message, before the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_support.config.loss import ActorLossConfig
from megatron_support.distributed.errors import raise_together
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import LogprobFault
from megatron_support.loss import TokenFault, describe_faults
from megatron_support.megatron.loss_function import MegatronActorLoss, MicrobatchRecord
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.support import check_support

_REMEDY = {
    "curr_logprobs": "check the weights, the learning rate and the logits of this microbatch",
    "prev_logprobs": "check the weights; without a filter every previous log-probability must be finite",
    "generation_logprobs": "correct the rollouts; -inf is a fact only of a sequence with top_k, top_p < 1 or a support",
    "reference_logprobs": "check the reference weights",
}


def check_rollouts(rollouts: RolloutBatch, config: ActorLossConfig) -> None:
    """Refuse a batch whose columns hold a fault at a token that the loss reads.

    Every rank holds the same batch, so all of them raise the same error and no collective is needed.

    Raises:
        LogprobFault: naming sample, token, which log-probability, value and remedy.
    """
    found = describe_faults(
        config,
        curr_logprobs=torch.zeros(rollouts.tokens.numel()),
        response_mask=rollouts.response_mask,
        sample_mask=rollouts.sample_mask,
        sequence_ids=rollouts.sequence_ids,
        filtered=rollouts.filtering,
        prev_logprobs=rollouts.prev_logprobs,
        generation_logprobs=rollouts.generation_logprobs,
        reference_logprobs=rollouts.reference_logprobs,
    )
    if found:
        raise LogprobFault(_message([_name(fault, fault.position, rollouts) for fault in found]))


def check_replayed(rollouts: RolloutBatch, vocab_size: int) -> None:
    """Refuse a batch with a kept set that does not fit its response token, before any pass.

    Every rank holds the same batch, so all of them raise the same error and no collective is needed.

    Raises:
        RolloutError: naming sample, token and remedy.
    """
    if rollouts.support is None:
        return
    targets = torch.where(rollouts.response_mask, rollouts.tokens, -1)
    check_support(rollouts.support, targets, vocab_size, name=lambda token: _place(token, rollouts))


def raise_faults(
    records: Sequence[MicrobatchRecord], loss: MegatronActorLoss, rollouts: RolloutBatch, groups: ParallelGroups
) -> None:
    """Name the faults that microbatches counted, and raise on every rank. Collective over all ranks.

    Args:
        records: this rank's microbatches (none on an earlier pipeline stage).
        loss: the loss that counted them.
        rollouts: the minibatch.
        groups: the ranks' layout.

    Raises:
        LogprobFault: the same on every rank; it names the rank, too.
    """
    names = []
    if groups.tensor_rank == 0:  # tensor-parallel ranks hold the same values
        for record in records:
            for fault in describe_faults(loss.config, **loss.tensors(record.batch, record.logprobs)):
                token = int(record.batch.token_index[fault.position])
                names.append(_name(fault, token, rollouts) + f" (rank {groups.world_rank})")
    raise_together(LogprobFault(_message(names)) if names else None, groups.world, loss.model.device)


def _name(fault: TokenFault, token: int, rollouts: RolloutBatch) -> str:
    """``token``: index into the batch's flat storage."""
    remedy = _REMEDY.get(fault.name, "correct it")
    return f"{fault.name} of {_place(token, rollouts)} is {fault.value}; {fault.rule}; {remedy}"


def _place(token: int, rollouts: RolloutBatch) -> str:
    """Sample and position of an entry of the batch's flat storage."""
    sequence = int(torch.searchsorted(rollouts.cu_seqlens, token, right=True)) - 1
    return f"sample {rollouts.sample_ids[sequence]!r}, token {token - int(rollouts.cu_seqlens[sequence])}"


def _message(names: Sequence[str], limit: int = 5) -> str:
    more = [f"and {len(names) - limit} more"] if len(names) > limit else []
    return "\n".join([*names[:limit], *more])
