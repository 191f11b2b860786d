"""What the steps of a run leave behind for its summary, also over restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_support.config.recipe import Recipe
from megatron_support.megatron.actor_step import StepResult
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.training.exclusions import ExcludedToken, Exclusions, count_exclusions
from megatron_support.training.summary import Summary
from megatron_support.training.token_record import record_tokens


@dataclass
class History:
    """Grows with each step."""

    rewards: list[float] = field(default_factory=list)
    mismatches: list[float] = field(default_factory=list)
    exclusions: Exclusions = field(default_factory=Exclusions)
    excluded_tokens: set[int] = field(default_factory=set)
    """Ids, for their text."""
    last: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""
    rollouts: RolloutBatch | None = None
    """Those of the last step alone; None where none was done since the run was continued."""

    def add(self, step: int, result: StepResult, *, epochs: int) -> dict[str, Any]:
        """Take a step in; returns what its single tokens say."""
        metrics, rollouts = result.metrics, result.rollouts
        self.last, self.rollouts = metrics, rollouts
        self.rewards.append(float(rollouts.rewards.mean()))
        if "token_mult_prob_error" in metrics:
            self.mismatches.append(metrics["token_mult_prob_error"])
        if "excluded_by_previous" not in metrics:  # the loss does not read them, whatever they are
            rollouts = rollouts.with_columns(prev_logprobs=None)
        excluded = int(metrics.get("policy_support_excluded_tokens", 0))
        self.exclusions += count_exclusions(step, rollouts, excluded=excluded, epochs=epochs)
        record = record_tokens(step, rollouts)
        self.excluded_tokens.update(int(token) for token in record["tokens"])
        return record

    def summary(self, recipe: Recipe, folder: Path) -> Summary:
        return Summary(
            recipe=recipe,
            rewards=self.rewards,
            exclusions=self.exclusions,
            mismatch=sum(self.mismatches) / len(self.mismatches) if self.mismatches else None,
            last=self.last,
            folder=folder,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint: everything but the rollouts."""
        return {
            "rewards": list(self.rewards),
            "mismatches": list(self.mismatches),
            "exclusions": asdict(self.exclusions),
            "excluded_tokens": sorted(self.excluded_tokens),
            "last": dict(self.last),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> History:
        """What :meth:`to_dict` wrote."""
        exclusions = dict(saved["exclusions"])
        exclusions["worst"] = tuple(ExcludedToken(**token) for token in exclusions["worst"])
        return cls(
            rewards=list(saved["rewards"]),
            mismatches=list(saved["mismatches"]),
            exclusions=Exclusions(**exclusions),
            excluded_tokens=set(saved["excluded_tokens"]),
            last=dict(saved["last"]),
        )
