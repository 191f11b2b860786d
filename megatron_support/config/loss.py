"""Configuration of the actor loss: types, not flags. A combination that has no meaning cannot be written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from typing_extensions import Self

from megatron_support.config.base import RuleErrors, StrictModel, choice_meant

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
ClipLow = Annotated[float, Field(gt=0, le=1)]


class _BuiltInSurrogate(StrictModel):
    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments of the surrogate function."""
        return {name: value for name, value in self.__dict__.items() if name != "type"}


class PPOClip(_BuiltInSurrogate):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv:1707.06347, asymmetric: arXiv:2503.14476)."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: ClipLow = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where A < 0 the ratio counts at most this (arXiv:1912.09729); null for no bound."""


class CISPO(_BuiltInSurrogate):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 0.2
    clip_high: Positive = 0.2


class Reinforce(_BuiltInSurrogate):
    """-A log p."""

    type: Literal["reinforce"] = "reinforce"


class OnPolicy(_BuiltInSurrogate):
    """-r A with r = p / sg(p): previous log-probabilities are the current ones, detached."""

    type: Literal["on_policy"] = "on_policy"


class SAPO(_BuiltInSurrogate):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05


class GMPO(_BuiltInSurrogate):
    """-A exp(mean of clipped log-ratios), one value a sequence (arXiv:2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: Positive = 0.4
    """Bounds of the token's log-ratio, not of its ratio."""
    clip_high: Positive = 0.4


class DPPOTotalVariation(_BuiltInSurrogate):
    """-sg(min(r, ratio_cap)) A log p while p - p_prev is in [-low, high] on the side A pushes to (arXiv:2602.04879)."""

    type: Literal["dppo_tv"] = "dppo_tv"
    low: Positive = 0.15
    high: Positive = 0.15
    ratio_cap: Annotated[float, Field(ge=1)] = 20.0


class DPPOBinaryKL(_BuiltInSurrogate):
    """As dppo_tv, with the KL divergence of the two Bernoulli distributions {token, any other} (arXiv:2602.04879)."""

    type: Literal["dppo_kl"] = "dppo_kl"
    low: Positive = 0.05
    high: Positive = 0.05
    ratio_cap: Annotated[float, Field(ge=1)] = 20.0


class DRO(_BuiltInSurrogate):
    """-(A log p - beta/2 (log r)^2) (arXiv:2405.19107)."""

    type: Literal["dro"] = "dro"
    beta: Positive = 0.1


class TOPR(_BuiltInSurrogate):
    """-A log p where A >= 0, -sg(clip(r, 0, 1)) A log p where A < 0 (arXiv:2503.14286)."""

    type: Literal["topr"] = "topr"


_REGISTERED: dict[str, Mapping[str, inspect.Parameter]] = {}


def declare_surrogate(name: str, fn: Callable[..., Any]) -> None:
    """Make ``{type: name, ...}`` a valid surrogate whose fields are the keyword parameters of ``fn``."""
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    _REGISTERED[name] = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


class RegisteredSurrogate(StrictModel):
    """A surrogate added with ``register_surrogate``; its fields are the function's parameters."""

    model_config = ConfigDict(extra="allow")
    union_tag: ClassVar[str] = "registered"

    type: str

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in _REGISTERED:
            hint = choice_meant(value, [*BUILT_IN_SURROGATES, *_REGISTERED])
            raise ValueError(f"unknown surrogate, got {value!r}; {hint} (or add it with register_surrogate)")
        return value

    @model_validator(mode="after")
    def _parameters(self) -> Self:
        expected = _REGISTERED[self.type]
        problems = []
        for name, value in self.parameters.items():
            if name not in expected:
                allowed = ", ".join(expected) or "none"
                problems.append((name, f"unknown field of surrogate {self.type!r}; use one of: {allowed}"))
            elif not isinstance(value, int | float | str | None):
                problems.append((name, f"must be a number, a string or null, got {value!r}; change it to fit"))
        for name, parameter in expected.items():
            if parameter.default is parameter.empty and name not in self.parameters:
                problems.append((name, f"required by surrogate {self.type!r} and missing; add it"))
        if problems:
            raise RuleErrors(problems)
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments of the function."""
        return dict(self.model_extra or {})


BUILT_IN_SURROGATES = (
    "ppo_clip",
    "cispo",
    "reinforce",
    "on_policy",
    "sapo",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "topr",
)


def _surrogate_tag(value: Any) -> str | None:
    name = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if not isinstance(name, str):
        return None
    return name if name in BUILT_IN_SURROGATES else RegisteredSurrogate.union_tag


Surrogate = Annotated[
    Annotated[PPOClip, Tag("ppo_clip")]
    | Annotated[CISPO, Tag("cispo")]
    | Annotated[Reinforce, Tag("reinforce")]
    | Annotated[OnPolicy, Tag("on_policy")]
    | Annotated[SAPO, Tag("sapo")]
    | Annotated[GMPO, Tag("gmpo")]
    | Annotated[DPPOTotalVariation, Tag("dppo_tv")]
    | Annotated[DPPOBinaryKL, Tag("dppo_kl")]
    | Annotated[DRO, Tag("dro")]
    | Annotated[TOPR, Tag("topr")]
    | Annotated[RegisteredSurrogate, Tag("registered")],
    Discriminator(_surrogate_tag),
]


class TokenMean(StrictModel):
    """Sum over tokens / number of tokens."""

    type: Literal["token_mean"] = "token_mean"


class TokenSum(StrictModel):
    """Sum over tokens, divided by nothing."""

    type: Literal["token_sum"] = "token_sum"


class SequenceMean(StrictModel):
    """Mean over sequences of the mean over a sequence's tokens."""

    type: Literal["sequence_mean"] = "sequence_mean"


class SequenceMeanTokenSum(StrictModel):
    """Mean over sequences of the sum over a sequence's tokens."""

    type: Literal["sequence_mean_token_sum"] = "sequence_mean_token_sum"


class DrGRPO(StrictModel):
    """Mean over sequences of the sum over a sequence's tokens / max_length (arXiv:2503.20783)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    max_length: Annotated[int, Field(ge=1)]
    """The same constant for every sequence, e.g. the generation limit."""


Aggregation = Annotated[
    TokenMean | TokenSum | SequenceMean | SequenceMeanTokenSum | DrGRPO, Field(discriminator="type")
]


class KLConfig(StrictModel):
    """coef * KL(current || reference) under the KL mask, on unfiltered log-probabilities."""

    coef: NonNegative
    type: Literal["k1", "k2", "k3", "abs"] = "k3"
    on_policy: bool = False
    """Weight by current / generation probability: the expectation is over the current policy (arXiv:2506.09477)."""
    input_clamp: Positive | None = 20.0
    """Bound of |log-ratio|; null for none."""
    output_clamp: Positive | None = 10.0
    """Bound of a token's weighted KL; null for none."""


class FullCorrection(StrictModel):
    """Weight exp(prev - generation), at most exp(20)."""

    type: Literal["full"] = "full"

    @property
    def window(self) -> dict[str, float]:
        """Bounds as keyword arguments."""
        return {}


class _Window(StrictModel):
    low: NonNegative
    high: Positive

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise RuleErrors([("low", f"must be <= high ({self.high}), got {self.low}; lower it or raise high")])
        return self

    @property
    def window(self) -> dict[str, float]:
        """Bounds as keyword arguments."""
        return {"low": self.low, "high": self.high}


class TruncatedCorrection(_Window):
    """Weight clamped into [low, high] (truncated importance sampling)."""

    type: Literal["tis"] = "tis"
    low: NonNegative = 0.0


class IcePopCorrection(_Window):
    """Weight 0 outside [low, high]."""

    type: Literal["icepop"] = "icepop"


class SequenceMaskCorrection(_Window):
    """Weight 0 for a sequence whose geometric mean weight is outside [low, high]; else untruncated."""

    type: Literal["sequence_mask"] = "sequence_mask"


Correction = Annotated[
    FullCorrection | TruncatedCorrection | IcePopCorrection | SequenceMaskCorrection, Field(discriminator="type")
]


class OPSM(StrictModel):
    """Drop a sequence with negative advantage whose mean of prev - curr exceeds ``threshold`` (DeepSeek-V3.2)."""

    type: Literal["opsm"] = "opsm"
    threshold: NonNegative


class ActorLossConfig(StrictModel):
    """The actor loss."""

    surrogate: Surrogate = PPOClip()
    ratio_level: Literal["token", "sequence", "sequence_token"] = "token"
    """sequence: one ratio a sequence, exp of the mean log-ratio (GSPO, arXiv:2507.18071); sequence_token: its value,
    with the token's own gradient (GSPO-token)."""
    aggregation: Aggregation = TokenMean()
    """gmpo has one loss per sequence: with it token_mean, the default, becomes sequence_mean."""
    normalization: Literal["rollout", "survivors"] = "rollout"
    """Denominators are global counts before (rollout) or after (survivors) exclusion."""
    kl: KLConfig | None = None
    correction: Correction | None = None
    entropy_coef: NonNegative = 0.0
    """Bonus for the entropy of the whole vocabulary at surviving tokens."""
    positive_nll_coef: NonNegative = 0.0
    """Weight of the mean negative log-likelihood of samples with a positive reward (arXiv:2504.05118)."""
    min_support_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """A sequence with a smaller share of surviving tokens leaves the actor term."""
    sequence_error_threshold: Annotated[float, Field(ge=1)] | None = None
    """A sequence whose mean exp|prev - generation| is larger is masked; null for no check."""
    sequence_mask: OPSM | None = None

    @model_validator(mode="before")
    @classmethod
    def _gmpo_is_a_mean_over_sequences(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or _surrogate_tag(data.get("surrogate")) != "gmpo":
            return data
        aggregation = data.get("aggregation", TokenMean())
        name = aggregation.get("type") if isinstance(aggregation, Mapping) else getattr(aggregation, "type", None)
        return {**data, "aggregation": SequenceMean()} if name == "token_mean" else data

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        surrogate = self.surrogate.type
        problems = []
        if self.ratio_level != "token" and surrogate in _TOKEN_RATIO_ONLY:
            problems.append(
                (
                    "ratio_level",
                    f"must be 'token' with surrogate {surrogate!r}, which {_TOKEN_RATIO_ONLY[surrogate]}, "
                    f"got {self.ratio_level!r}; use token, or another surrogate",
                )
            )
        if surrogate == "gmpo" and self.aggregation.type != "sequence_mean":
            problems.append(
                (
                    "aggregation.type",
                    f"must be 'sequence_mean' with surrogate 'gmpo', which has one loss per sequence, "
                    f"got {self.aggregation.type!r}; use sequence_mean",
                )
            )
        if surrogate == "on_policy" and self.sequence_mask is not None:
            problems.append(
                (
                    "sequence_mask",
                    "must be null with surrogate 'on_policy', whose divergence from the previous policy is 0, "
                    f"got {self.sequence_mask.type!r}; remove it",
                )
            )
        if problems:
            raise RuleErrors(problems)
        return self

    @property
    def denominator(self) -> Literal["tokens", "sequences", "none"]:
        """What the aggregation divides by: the count that a host must reduce over ranks."""
        if self.aggregation.type == "token_sum":
            return "none"
        return "tokens" if self.aggregation.type == "token_mean" else "sequences"

    @property
    def needs_previous(self) -> bool:
        """Whether a term reads previous log-probabilities."""
        if self.surrogate.type == "on_policy":
            return False
        reads_ratio = self.surrogate.type != "reinforce"
        error = self.sequence_error_threshold is not None
        return reads_ratio or self.correction is not None or self.sequence_mask is not None or error

    @property
    def needs_generation(self) -> bool:
        """Whether a term reads generation log-probabilities."""
        on_policy_kl = self.needs_reference and self.kl is not None and self.kl.on_policy
        return on_policy_kl or self.correction is not None or self.sequence_error_threshold is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the KL term is on."""
        return self.kl is not None and self.kl.coef > 0


_TOKEN_RATIO_ONLY = {
    "reinforce": "reads no ratio",
    "gmpo": "takes its own mean over the sequence",
    "dppo_tv": "compares probabilities of tokens",
    "dppo_kl": "compares probabilities of tokens",
    "dro": "penalises the token's log-ratio",
    "topr": "truncates the token's ratio",
}

SURROGATE_TYPES: tuple[type[BaseModel], ...] = (
    PPOClip,
    CISPO,
    Reinforce,
    OnPolicy,
    SAPO,
    GMPO,
    DPPOTotalVariation,
    DPPOBinaryKL,
    DRO,
    TOPR,
)
assert tuple(t.model_fields["type"].default for t in SURROGATE_TYPES) == BUILT_IN_SURROGATES
