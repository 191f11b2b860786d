"""A number that must be finite and is not: found on all ranks together, named, and stopped or left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.recipe import OnFault
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import GradientFault, LogprobFault
from megatron_support.loss import TokenFault, describe_faults, fault_mask
from megatron_support.megatron.gather import gather_columns, logprob_rows
from megatron_support.megatron.loss_function import MegatronActorLoss, MicrobatchRecord
from megatron_support.metrics import Sum
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.support import check_support, packed_names

CURRENT_COLUMNS = ("curr_logprobs", "curr_logprobs_unfiltered", "entropy")
"""What the loss saw of the current policy."""

_REMEDY = {
    "curr_logprobs": "check the weights, the learning rate and the logits of this microbatch",
    "curr_logprobs_unfiltered": "check the weights, the learning rate and the logits of this microbatch",
    "entropy": "check the weights, the learning rate and the logits of this microbatch",
    "prev_logprobs": "check the weights; without a filter every previous log-probability must be finite",
    "generation_logprobs": "correct the rollouts; -inf is a fact only of a sequence with top_k, top_p < 1 or a support",
    "reference_logprobs": "check the reference weights",
}


@dataclass(frozen=True, kw_only=True)
class FoundFaults:
    """What is wrong with a batch, the same on every rank."""

    message: str
    """The first faults: which log-probability, sample, token, value, its neighbours, rule and remedy."""
    sequences: Tensor
    """int64, indices of all sequences with a fault, ascending."""
    rollouts: RolloutBatch
    """These sequences, with every column that the loss read."""

    @property
    def error(self) -> LogprobFault:
        return LogprobFault(self.message, rollouts=self.rollouts)


class LeftOut:
    """The sequences that one step leaves out because of faults, the same on every rank.

    Args:
        on_fault: ``raise``; ``skip_sample``: go on without the sequences at fault; ``skip_step``: no further update.
        num_sequences: of the step.
    """

    def __init__(self, on_fault: OnFault, num_sequences: int) -> None:
        self.on_fault = on_fault
        self.sequences = torch.zeros(num_sequences, dtype=torch.bool)
        """``[S]``: not to be used any more."""
        self._faulty = torch.zeros(num_sequences, dtype=torch.bool)
        self._gradients = 0

    def take(self, found: FoundFaults, indices: Tensor | None = None) -> None:
        """Leave faulty sequences out.

        Args:
            found: the faults.
            indices: the step's sequences that ``found`` counts from 0; None for all.

        Raises:
            LogprobFault: ``on_fault`` is ``raise``.
        """
        if self.on_fault == "raise":
            raise found.error
        self._faulty[found.sequences if indices is None else indices[found.sequences]] = True
        self.sequences = self.sequences | self._faulty | (self.on_fault == "skip_step")

    def take_gradient(self, norm: float) -> None:
        """A gradient that is not finite although every log-probability is: no sample can be named.

        Raises:
            GradientFault: ``on_fault`` is ``raise``.
        """
        if self.on_fault == "raise":
            raise GradientFault(
                f"the gradient norm must be finite, got {norm} although every log-probability is finite; nothing was "
                "updated: check activations and the backward pass, or lower the learning rate"
            )
        self._gradients += 1
        self.sequences = self.sequences | (self.on_fault == "skip_step")

    def mask(self, rollouts: RolloutBatch) -> RolloutBatch:
        """The batch without the sequences that are left out in any of its terms."""
        if not bool(self.sequences.any()):
            return rollouts
        return rollouts.with_columns(sample_mask=rollouts.sample_mask & ~self.sequences)

    @property
    def metrics(self) -> dict[str, Sum]:
        """Counts of the step; none with ``raise``."""
        if self.on_fault == "raise":
            return {}
        found = bool(self._faulty.any()) or self._gradients > 0
        return {
            "faulty_samples": Sum(int(self._faulty.sum())),
            "faulty_gradients": Sum(self._gradients),
            "skipped_steps": Sum(int(found and self.on_fault == "skip_step")),
        }


def find_rollout_faults(
    rollouts: RolloutBatch,
    config: ActorLossConfig,
    *,
    current: bool = False,
    rank_of: Callable[[int], int] | None = None,
) -> FoundFaults | None:
    """Faults in a batch's columns at tokens that the loss reads; None if there are none.

    Every rank holds the same batch and finds the same, so no collective is needed.

    Args:
        rollouts: the batch.
        config: what the loss reads.
        current: whether the loss reads the batch's own columns of the current policy, and its advantages.
        rank_of: the rank that computed a token, for the message.
    """
    if current:
        computed = {name: getattr(rollouts, name) for name in (*CURRENT_COLUMNS, "advantages")}
    else:
        computed = {"curr_logprobs": torch.zeros(rollouts.tokens.numel())}
    tensors = {
        **computed,
        "response_mask": rollouts.response_mask,
        "sample_mask": rollouts.sample_mask,
        "sequence_ids": rollouts.sequence_ids,
        "filtered": rollouts.filtering,
        "prev_logprobs": rollouts.prev_logprobs,
        "generation_logprobs": rollouts.generation_logprobs,
        "reference_logprobs": rollouts.reference_logprobs,
    }
    mask = fault_mask(config, **tensors)
    if not bool(mask.any()):
        return None
    sequences = rollouts.sequence_ids[mask].unique()
    named = [_name(fault, rollouts, rank_of) for fault in describe_faults(config, **tensors)]
    return FoundFaults(message=_message(named), sequences=sequences, rollouts=rollouts.select(sequences))


def check_rollouts(rollouts: RolloutBatch, config: ActorLossConfig, *, current: bool = False) -> None:
    """Refuse a batch with a fault; arguments as for :func:`find_rollout_faults`.

    Raises:
        LogprobFault: naming sample, token, which log-probability, value and remedy.
    """
    found = find_rollout_faults(rollouts, config, current=current)
    if found is not None:
        raise found.error


def find_minibatch_faults(
    records: Sequence[MicrobatchRecord], loss: MegatronActorLoss, rollouts: RolloutBatch, groups: ParallelGroups
) -> FoundFaults:
    """Name the faults that microbatches counted. Collective over all ranks; only for a minibatch that has some.

    Args:
        records: this rank's microbatches (none on an earlier pipeline stage).
        loss: the loss that counted them.
        rollouts: the minibatch.
        groups: the ranks' layout.
    """
    entropy = loss.config.entropy_coef > 0
    # tensor-parallel ranks hold the same values: the first of them is named
    rank = float(groups.world_rank - groups.tensor_rank)
    pieces = [
        (record.batch, torch.stack([*rows, torch.full_like(rows[0], rank)]))
        for record in records
        for rows in (logprob_rows(record.logprobs, entropy),)
    ]
    *columns, ranks = gather_columns(
        pieces, 3 + entropy, rollouts.tokens.numel(), groups=groups, device=loss.model.device
    )
    seen = rollouts.with_columns(**dict(zip(CURRENT_COLUMNS, columns, strict=False)))
    found = find_rollout_faults(seen, loss.config, current=True, rank_of=lambda token: int(ranks[token]))
    assert found is not None, "the microbatches counted faults that the batch does not show"
    return found


def check_replayed(rollouts: RolloutBatch, vocab_size: int) -> None:
    """Refuse a batch with a kept set that does not fit its response token, before any pass.

    Every rank holds the same batch, so all of them raise the same error and no collective is needed.

    Raises:
        RolloutError: naming sample, token and remedy.
    """
    if rollouts.support is None:
        return
    targets = torch.where(rollouts.response_mask, rollouts.tokens, -1)
    check_support(rollouts.support, targets, vocab_size, name=packed_names(rollouts.cu_seqlens, rollouts.sample_ids))


def _name(fault: TokenFault, rollouts: RolloutBatch, rank_of: Callable[[int], int] | None) -> str:
    token = fault.position
    remedy = _REMEDY.get(fault.name, "correct it")
    rank = "" if rank_of is None else f" (rank {rank_of(token)})"
    place = packed_names(rollouts.cu_seqlens, rollouts.sample_ids)(token)
    around = _neighbours(getattr(rollouts, fault.name, None), token, rollouts)
    return f"{fault.name} of {place} is {fault.value}{around}; {fault.rule}; {remedy}{rank}"


def _neighbours(column: Tensor | None, token: int, rollouts: RolloutBatch) -> str:
    """The values beside a token in its sequence's response."""
    if column is None:
        return ""
    beside = [
        f"{float(column[t]):.4g} at {word}"
        for t, word in ((token - 1, "the token before"), (token + 1, "the token after"))
        if 0 <= t < column.numel()
        and bool(rollouts.response_mask[t])
        and int(rollouts.sequence_ids[t]) == int(rollouts.sequence_ids[token])
    ]
    return f" ({', '.join(beside)})" if beside else ""


def _message(names: Sequence[str], limit: int = 5) -> str:
    more = [f"and {len(names) - limit} more"] if len(names) > limit else []
    return "\n".join([*names[:limit], *more])
