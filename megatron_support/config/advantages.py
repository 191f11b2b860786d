"""Configuration of the advantage estimators."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_support.config.base import StrictModel

Positive = Annotated[float, Field(gt=0)]
Discount = Annotated[float, Field(ge=0, le=1)]


class KLInReward(StrictModel):
    """coef * KL(previous || reference) taken off the reward of each token."""

    coef: Positive
    type: Literal["k1", "k2", "k3", "abs"] = "k1"
    input_clamp: Positive | None = 20.0
    """Bound of |log-ratio|; null for none."""
    output_clamp: Positive | None = 10.0
    """Bound of a token's KL; null for none."""


class _Estimator(StrictModel):
    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that a batch must carry."""
        kl = getattr(self, "kl_in_reward", None)
        return () if kl is None else ("prev_logprobs", "reference_logprobs")


class GRPOConfig(_Estimator):
    """Reward against the other samples of the prompt (arXiv:2402.03300)."""

    type: Literal["grpo"] = "grpo"
    leave_one_out: bool = False
    """Baseline over the other samples of the prompt instead of all."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    kl_in_reward: KLInReward | None = None


class RLOOConfig(_Estimator):
    """Reward minus the mean of the prompt's other samples (arXiv:2402.14740)."""

    type: Literal["rloo"]
    kl_in_reward: KLInReward | None = None


class ReinforcePPConfig(_Estimator):
    """Return minus a baseline, whitened over the batch (arXiv:2501.03262)."""

    type: Literal["reinforce_pp"]
    baseline: bool = False
    """Take the prompt's mean reward off first (REINFORCE++-baseline)."""
    gamma: Discount = 1.0
    whiten: bool = True
    kl_in_reward: KLInReward | None = None


class GAEConfig(_Estimator):
    """Generalised advantage estimation from a value column (arXiv:1506.02438)."""

    type: Literal["gae"]
    gamma: Discount = 1.0
    lam: Discount = 0.95
    length_adaptive_alpha: Positive | None = None
    """lam = 1 - 1 / (alpha * response length) in place of ``lam`` (arXiv:2504.05118); null for a fixed one."""
    whiten: bool = True
    kl_in_reward: KLInReward | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (*super().columns, "values")


class OPDConfig(_Estimator):
    """On-policy distillation: log-probability of a teacher minus one's own, per token."""

    type: Literal["opd"]
    coef: Positive = 1.0
    whiten: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return ("prev_logprobs", "teacher_logprobs")


class GDPOConfig(_Estimator):
    """GRPO for each reward component by itself, then their weighted sum, whitened (arXiv:2601.05242)."""

    type: Literal["gdpo"]
    weights: Annotated[list[float], Field(min_length=1)] | None = None
    """One a component; null for equal weights."""
    leave_one_out: bool = False
    normalize_std: bool = True
    whiten: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        return ("reward_components",)


Advantages = Annotated[
    GRPOConfig | RLOOConfig | ReinforcePPConfig | GAEConfig | OPDConfig | GDPOConfig, Field(discriminator="type")
]
