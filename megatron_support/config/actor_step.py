"""What one actor step does with its rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_support.config.advantages import Advantages, GRPOConfig
from megatron_support.config.base import StrictModel
from megatron_support.config.bounds import NonNegativeInt, PositiveInt
from megatron_support.config.loss import ActorLossConfig

OnFault = Literal["raise", "skip_sample", "skip_step"]


class MicrobatchConfig(StrictModel):
    """How a minibatch is cut for gradient accumulation."""

    layout: Literal["packed", "padded"] = "packed"
    max_tokens: PositiveInt
    """Token budget of one microbatch on one data-parallel rank (over all its context-parallel ranks)."""
    max_tokens_forward: PositiveInt | None = None
    """Budget of forward-only passes; null for ``max_tokens``."""
    truncate: bool = False
    """Cut a sequence of a rollout file that is longer than the smaller budget there, instead of refusing it: the tokens
    beyond are in no pass and no term. Its reward stays that of the whole response."""

    @property
    def longest_sequence(self) -> int:
        """Tokens that fit into every pass."""
        return min(self.max_tokens, self.max_tokens_forward or self.max_tokens)


class LogprobConfig(StrictModel):
    """How log-probabilities are computed."""

    chunk_size: PositiveInt | None = None
    """Tokens per work chunk; null lets the code choose."""
    fused_head: bool | Literal["auto"] = "auto"
    """Compute log-probabilities from hidden states, so that all logits of a microbatch never exist at once. auto: where
    those of a rank would take more than 256 MiB."""
    response_only: bool = True
    """Compute log-probabilities of response tokens alone; nothing reads the others."""
    ties: Literal["group", "index"] = "group"
    """group: every logit equal to the smallest kept one is kept; index: that group is cut, lowest id first."""
    support: Literal["recompute", "replay"] = "recompute"
    """recompute: from the trainer's logits under each row's filter; replay: the sampler's own kept sets."""


class SequenceFilterConfig(StrictModel):
    """Sequences that leave before training: their ``sample_mask`` is cleared before counts and advantages."""

    max_logprob_error: Annotated[float, Field(ge=1)] | None = None
    """Largest accepted mean of exp|prev - generation| over a response's surviving tokens; null for no check."""
    max_response_tokens: PositiveInt | None = None
    """A response of this many tokens or more was cut off and its reward means little; null for no check."""

    @property
    def needs_previous(self) -> bool:
        """Whether it reads previous log-probabilities."""
        return self.max_logprob_error is not None


class ActorStepConfig(StrictModel):
    """What one actor step does with its rollouts: the part of a recipe that a library user passes to ``ActorStep``."""

    loss: ActorLossConfig = ActorLossConfig()
    advantages: Advantages = GRPOConfig()
    logprobs: LogprobConfig = LogprobConfig()
    sequence_filter: SequenceFilterConfig = SequenceFilterConfig()
    microbatch: MicrobatchConfig
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 1
    shuffle: bool = False
    on_fault: OnFault = "raise"
    """What a number that must be finite and is not does. raise: end the run before an update. skip_sample: go on
    without the samples at fault, as if they were not there. skip_step: no further update in this step. Counted."""
    seed: NonNegativeInt = 1234

    @property
    def needs_previous(self) -> bool:
        """Whether the step computes previous log-probabilities."""
        readers = (self.loss.needs_previous, self.sequence_filter.needs_previous)
        return any(readers) or "prev_logprobs" in self.advantages.columns

    @property
    def needs_reference(self) -> bool:
        """Whether the step computes reference log-probabilities."""
        return self.loss.needs_reference or "reference_logprobs" in self.advantages.columns
