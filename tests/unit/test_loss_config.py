"""Wrong configurations and what is said about them; all errors are reported at once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatron_support.config import ActorLossConfig
from megatron_support.errors import ConfigurationError

NAN, INF = float("nan"), float("inf")
PPO, CISPO, ICEPOP = {"type": "ppo_clip"}, {"type": "cispo"}, {"type": "icepop", "low": 0.5, "high": 2.0}

WRONG = [
    (
        {"surrogate": {"type": "ppo_clp"}},
        ["surrogate.type: unknown surrogate, got 'ppo_clp'", "did you mean 'ppo_clip'?"],
    ),
    (
        {"surrogate": {"type": "magic"}},
        ["surrogate.type: unknown surrogate, got 'magic'", "use one of: ppo_clip, cispo"],
    ),
    ({"surrogate": {"clip_low": 0.1}}, ["surrogate: a mapping with a field 'type' is required", "add 'type: ...'"]),
    ({"surrogate": "ppo_clip"}, ["surrogate: a mapping with a field 'type' is required, got 'ppo_clip'"]),
    ({"surrogate": {**PPO, "clip_hi": 0.3}}, ["surrogate.clip_hi: unknown field; did you mean 'clip_high'?"]),
    ({"surrogate": {**PPO, "clip_low": 0}}, ["surrogate.clip_low: must be greater than 0, got 0"]),
    ({"surrogate": {**PPO, "clip_low": 1.5}}, ["surrogate.clip_low: must be less than or equal to 1, got 1.5"]),
    ({"surrogate": {**PPO, "clip_high": -0.2}}, ["surrogate.clip_high: must be greater than 0, got -0.2"]),
    ({"surrogate": {**PPO, "clip_high": "0.2"}}, ["surrogate.clip_high: must be a valid number, got '0.2'"]),
    ({"surrogate": {**PPO, "clip_high": True}}, ["surrogate.clip_high: must be a valid number, got True"]),
    ({"surrogate": {**PPO, "clip_high": INF}}, ["surrogate.clip_high: must be a finite number, got inf"]),
    ({"surrogate": {**PPO, "dual_clip": 1.0}}, ["surrogate.dual_clip: must be greater than 1, got 1.0"]),
    (
        {"surrogate": {**CISPO, "dual_clip": 3.0}},
        ["surrogate.dual_clip: unknown field; use one of: type, clip_low, clip_high"],
    ),
    ({"surrogate": {"type": "reinforce", "clip_low": 0.2}}, ["surrogate.clip_low: unknown field; use one of: type"]),
    ({"surrogate": {"type": "sapo", "tau_positive": 0.0}}, ["surrogate.tau_positive: must be greater than 0, got 0.0"]),
    ({"surrogate": {"type": "dro", "beta": -1}}, ["surrogate.beta: must be greater than 0, got -1"]),
    (
        {"surrogate": {"type": "dppo_tv", "ratio_cap": 0.5}},
        ["surrogate.ratio_cap: must be greater than or equal to 1, got 0.5"],
    ),
    (
        {"ratio_level": "sentence"},
        ["ratio_level: must be one of 'token', 'sequence' or 'sequence_token', got 'sentence'"],
    ),
    (
        {"ratio_level": "sequence", "surrogate": {"type": "reinforce"}},
        ["ratio_level: must be 'token' with surrogate 'reinforce', which reads no ratio, got 'sequence'; use token"],
    ),
    (
        {"ratio_level": "sequence_token", "surrogate": {"type": "dppo_kl"}},
        ["ratio_level: must be 'token' with surrogate 'dppo_kl'", "got 'sequence_token'"],
    ),
    ({"aggregation": {"type": "tokens"}}, ["aggregation.type: unknown type, got 'tokens'; did you mean 'token_"]),
    ({"aggregation": "token_mean"}, ["aggregation: must be a mapping", "got 'token_mean'"]),
    ({"aggregation": {"type": "dr_grpo"}}, ["aggregation.max_length: required and missing; add it"]),
    (
        {"aggregation": {"type": "dr_grpo", "max_length": 0}},
        ["aggregation.max_length: must be greater than or equal to 1, got 0"],
    ),
    ({"aggregation": {"type": "dr_grpo", "max_length": 1.5}}, ["aggregation.max_length: must be", "got 1.5"]),
    ({"aggregation": {"type": "token_mean", "max_length": 9}}, ["aggregation.max_length: unknown field"]),
    (
        {"aggregation": {"type": "token_sum"}, "surrogate": {"type": "gmpo"}},
        ["aggregation.type: must be 'sequence_mean' with surrogate 'gmpo'", "got 'token_sum'"],
    ),
    ({"normalization": "batch"}, ["normalization: must be one of 'rollout' or 'survivors', got 'batch'"]),
    ({"kl": {}}, ["kl.coef: required and missing; add it"]),
    ({"kl": {"coef": -0.1}}, ["kl.coef: must be greater than or equal to 0, got -0.1"]),
    ({"kl": {"coef": NAN}}, ["kl.coef: must be a finite number, got nan"]),
    ({"kl": {"coef": 0.1, "type": "k4"}}, ["kl.type: must be one of 'k1', 'k2', 'k3' or 'abs', got 'k4'"]),
    ({"kl": {"coef": 0.1, "on_policy": "yes"}}, ["kl.on_policy: must be a valid boolean, got 'yes'"]),
    ({"kl": {"coef": 0.1, "input_clamp": 0}}, ["kl.input_clamp: must be greater than 0, got 0"]),
    ({"kl": 0.1}, ["kl: must be a mapping of fields, got 0.1"]),
    ({"correction": {"type": "tis"}}, ["correction.high: required and missing; add it"]),
    ({"correction": {"type": "icepop", "high": 2.0}}, ["correction.low: required and missing; add it"]),
    (
        {"correction": {**ICEPOP, "low": 3.0}},
        ["correction.low: must be <= high (2.0), got 3.0; lower it or raise high"],
    ),
    ({"correction": {"type": "full", "high": 2.0}}, ["correction.high: unknown field; use one of: type"]),
    ({"correction": {"type": "ice_pop"}}, ["correction.type: unknown type, got 'ice_pop'; did you mean 'icepop'?"]),
    ({"entropy_coef": -0.01}, ["entropy_coef: must be greater than or equal to 0, got -0.01"]),
    ({"positive_nll_coef": None}, ["positive_nll_coef: must be a valid number, got None"]),
    ({"min_support_fraction": 1.1}, ["min_support_fraction: must be less than or equal to 1, got 1.1"]),
    ({"sequence_error_threshold": 0.9}, ["sequence_error_threshold: must be greater than or equal to 1, got 0.9"]),
    ({"sequence_mask": {"type": "opsm"}}, ["sequence_mask.threshold: required and missing; add it"]),
    (
        {"sequence_mask": {"type": "opsm", "threshold": 0.1}, "surrogate": {"type": "on_policy"}},
        ["sequence_mask: must be null with surrogate 'on_policy'", "got 'opsm'; remove it"],
    ),
    ({"entropy_coeff": 0.1}, ["entropy_coeff: unknown field; did you mean 'entropy_coef'?"]),
]


@pytest.mark.parametrize(("data", "parts"), WRONG, ids=[str(data) for data, _ in WRONG])
def test_a_wrong_configuration_is_an_error_naming_field_value_rule_and_remedy(data, parts):
    with pytest.raises(ConfigurationError) as error:
        ActorLossConfig.from_dict(data)
    message = str(error.value)
    assert message.startswith("ActorLossConfig: 1 error\n")
    for part in parts:
        assert part in message
    assert ";" in message  # a rule and a remedy


def test_all_errors_are_reported_at_once():
    data = {"surrogate": {**PPO, "clip_low": -1, "dual": 3}, "kl": {"type": "k9"}, "normalization": "x"}
    with pytest.raises(ConfigurationError) as error:
        ActorLossConfig.from_dict(data, source="recipe.yaml")
    lines = str(error.value).splitlines()
    assert lines[0] == "recipe.yaml: 5 errors"
    fields = [line.split(":")[0].strip() for line in lines[1:]]
    assert fields == ["surrogate.clip_low", "surrogate.dual", "normalization", "kl.coef", "kl.type"]


def test_broken_rules_between_fields_are_reported_together():
    data = {
        "surrogate": {"type": "gmpo"},
        "ratio_level": "sequence",
        "aggregation": {"type": "dr_grpo", "max_length": 8},
    }
    with pytest.raises(ConfigurationError, match=r"2 errors\n  ratio_level: .*\n  aggregation\.type: "):
        ActorLossConfig.from_dict(data)


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        ActorLossConfig().normalization = "survivors"


def test_the_default_is_ppo_with_a_symmetric_clip():
    default = ActorLossConfig()
    assert default.surrogate.parameters == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert ActorLossConfig.from_dict({}) == default


def test_gmpo_is_a_mean_over_sequences_however_it_is_asked_for():
    for data in ({}, {"aggregation": {"type": "token_mean"}}, {"aggregation": {"type": "sequence_mean"}}):
        config = ActorLossConfig.from_dict({"surrogate": {"type": "gmpo"}, **data})
        assert config.aggregation.type == "sequence_mean" and config.denominator == "sequences"


@pytest.mark.parametrize(
    ("data", "previous", "generation", "reference"),
    [
        ({}, True, False, False),
        ({"surrogate": {"type": "on_policy"}}, False, False, False),
        ({"surrogate": {"type": "reinforce"}}, False, False, False),
        ({"surrogate": {"type": "reinforce"}, "correction": {"type": "full"}}, True, True, False),
        ({"surrogate": {"type": "on_policy"}, "sequence_error_threshold": 2.0}, False, True, False),
        ({"kl": {"coef": 0.0}}, True, False, False),
        ({"kl": {"coef": 0.1}}, True, False, True),
        ({"kl": {"coef": 0.1, "on_policy": True}}, True, True, True),
    ],
)
def test_what_a_configuration_reads(data, previous, generation, reference):
    config = ActorLossConfig.from_dict(data)
    assert (config.needs_previous, config.needs_generation, config.needs_reference) == (previous, generation, reference)
