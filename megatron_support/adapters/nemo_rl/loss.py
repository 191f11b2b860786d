"""NeMo-RL's loss function protocol."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import host_metrics, load_settings, raise_faults, running_groups
from megatron_support.adapters.hooks import symbol
from megatron_support.adapters.nemo_rl.options import loss_config
from megatron_support.adapters.nemo_rl.tokens import local_rows, row_logprobs
from megatron_support.config.loss import ActorLossConfig
from megatron_support.distributed.metrics import reduce_metrics
from megatron_support.distributed.sequence_sum import sum_over_group
from megatron_support.errors import ConfigurationError
from megatron_support.loss import actor_loss
from megatron_support.metrics import MetricSet, Sum
from megatron_support.types import LossOutput, SamplingParams

INTERFACES = "nemo_rl.algorithms.loss.interfaces"
_COLUMNS = {
    "prev_logprobs": "prev_logprobs",
    "generation_logprobs": "generation_logprobs",
    "reference_logprobs": "reference_policy_logprobs",
}
_EXTREMA = ("probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min", "probs_ratio_clamped_max")
"""NeMo-RL takes the lowest or highest of these and adds up everything else."""


class SupportLossFn:
    """A loss function for NeMo-RL that takes logits, in place of its ``ClippedPGLossFn``.

    It asks for logits because NeMo-RL's log-probability path writes 0 where a token is outside the support.

    Args:
        cfg: NeMo-RL's ``ClippedPGLossConfig``.
        use_fused_linear_logprobs: must be False.

    Raises:
        ConfigurationError: the options describe no loss that NeMo-RL's loop can divide.
    """

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False) -> None:
        if use_fused_linear_logprobs:
            raise ConfigurationError(
                "policy.megatron_cfg.use_fused_linear_logprobs must be false, got true: it gives log-probabilities "
                "without a filter; turn it off"
            )
        self.config: ActorLossConfig = loss_config(cfg, load_settings())
        per_token = self.config.denominator == "tokens"
        self.input_type: Any = symbol(INTERFACES, "LossInputType").LOGIT
        self.loss_type: Any = getattr(symbol(INTERFACES, "LossType"), "TOKEN_LEVEL" if per_token else "SEQUENCE_LEVEL")
        self.metric_normalizations: dict[str, Any] = _normalizers(self.config)
        self.sampling: SamplingParams | None = None
        """The rollouts' filter; set by the worker."""

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        logits: Tensor,
        **unread: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of a microbatch, or of one packed sequence.

        Args:
            data: ``input_ids``, ``token_mask``, ``advantages`` and log-probabilities ``[B, S]``, ``sample_mask``
                ``[B]``.
            global_valid_seqs, global_valid_toks: what divides; NeMo-RL passes 1 where it divides later.
            logits: ``[B, P / C, V/TP]``, P padded tokens of a row, divided by the temperature.
            unread: not read.

        Returns:
            This context-parallel rank's part of the loss times the group's size, by which NeMo-RL divides; and metrics
            as its loop adds them up, of all context-parallel ranks.

        Raises:
            LogprobFault: a log-probability must be finite and is not.
            ConfigurationError: the worker is not registered, so that the filter is unknown.
        """
        settings, groups = load_settings(), running_groups()
        sampling = self._sampling()
        tokens = data["input_ids"]
        sequences, width = tokens.shape
        padded = torch.full((sequences,), logits.shape[1] * groups.context_size)
        rows = local_rows(padded, width, groups).to(logits.device)
        mask = data["token_mask"] != 0
        values = row_logprobs(
            logits.flatten(0, 1),
            rows.targets(tokens, mask),
            sampling,
            groups=groups,
            settings=settings,
            entropy=self.config.entropy_coef > 0,
        )
        tensors: dict[str, Any] = {
            "curr_logprobs": values.filtered,
            "curr_logprobs_unfiltered": values.unfiltered,
            "entropy": values.entropy,
            "advantages": rows.take(data["advantages"]),
            "response_mask": rows.predicts & rows.take(mask),
            "sequence_ids": rows.sequence,
            "sample_mask": data["sample_mask"] != 0,
            "filtered": sampling.filters,
            **{ours: rows.take(data[theirs]) for ours, theirs in _COLUMNS.items() if data.get(theirs) is not None},
        }
        raise_faults(self.config, **tensors)
        output = actor_loss(
            self.config,
            **tensors,
            global_valid_tokens=global_valid_toks,
            global_valid_sequences=global_valid_seqs,
            sequence_sum=None if groups.context is None else partial(sum_over_group, group=groups.context),
            counts_sequences=None if groups.context is None else groups.context_rank == 0,
        )
        metrics = output.metrics | {"loss": Sum(output.loss)}
        reduced = reduce_metrics(MetricSet(metrics), groups.context, logits.device)
        return output.loss * groups.context_size, _numbers(reduced, global_valid_toks, global_valid_seqs)

    def _sampling(self) -> SamplingParams:
        settings = load_settings()
        if settings.sampling is not None:
            return SamplingParams(1.0, settings.sampling.top_k, settings.sampling.top_p)
        if self.sampling is None:
            raise ConfigurationError(
                "the rollouts' filter must be known in the policy worker, got none: nemo_rl is not registered there; "
                "see examples/nemo_rl/README.md, or state sampling in the settings file"
            )
        return self.sampling


def _numbers(metrics: MetricSet, tokens: Tensor, sequences: Tensor) -> dict[str, float]:
    """Metrics as parts that add up, in one copy to the host."""
    ours = host_metrics(metrics)
    values = {name: total / _at_least_one(tokens) for name, total in ours.tokens.items()}
    values |= {name: total / _at_least_one(sequences) for name, total in ours.sequences.items()}
    values |= ours.counts
    values |= {name: ours.extrema[name] for name in _EXTREMA if name in ours.extrema}
    numbers = torch.stack([value.to(tokens.device, torch.float64) for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def _at_least_one(count: Tensor) -> Tensor:
    return torch.where(count > 0, count, torch.ones_like(count))


def _normalizers(config: ActorLossConfig) -> dict[str, Any]:
    """NeMo-RL's normaliser of each metric, read off the metrics of a loss of one token."""
    kinds = symbol(INTERFACES, "MetricNormalizer")
    ours = host_metrics(_one_token(config).metrics)
    found = dict.fromkeys(ours.tokens, kinds.TOKENS) | dict.fromkeys(ours.sequences, kinds.SEQUENCES)
    found |= dict.fromkeys(ours.counts, kinds.NONE) | {name: kinds.NONE for name in _EXTREMA if name in ours.extrema}
    found["loss"] = kinds.TOKENS if config.denominator == "tokens" else kinds.SEQUENCES
    return found


def _one_token(config: ActorLossConfig) -> LossOutput:
    one = -torch.ones(1, 1)
    return actor_loss(
        config,
        curr_logprobs=one,
        curr_logprobs_unfiltered=one,
        prev_logprobs=one,
        generation_logprobs=one,
        reference_logprobs=one,
        entropy=-one,
        advantages=one,
        response_mask=-one,
    )
