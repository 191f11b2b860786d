"""The verl adapter without verl: its policy loss by the registry's signature, its options, its head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_support import ActorLossConfig, SamplingParams, actor_loss, support_logprobs
from megatron_support.adapters.context import SETTINGS_VARIABLE, AdapterSettings
from megatron_support.adapters.verl import LOSS_MODE, policy_loss
from megatron_support.adapters.verl.engine import head_logprobs
from megatron_support.adapters.verl.options import AGGREGATIONS, divisors, loss_config
from megatron_support.errors import ConfigurationError, LogprobFault
from tests.adapters.verl_standin import actor_options, counts, rows

FILTER = "sampling: {top_k: 20, top_p: 0.9}\n"


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Write this process's settings file."""

    def write(text: str) -> None:
        path = tmp_path / f"settings{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text)
        monkeypatch.setenv(SETTINGS_VARIABLE, str(path))

    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    return write


def theirs(batch, config, mode, **more):
    """(loss, gradient of the current log-probabilities) by the registry's signature."""
    current = batch["log_prob"].clone().requires_grad_()
    loss, metrics = policy_loss(
        old_log_prob=batch["old_log_prob"],
        log_prob=current,
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
        loss_agg_mode=mode,
        config=config,
        **more,
    )
    loss.backward()
    return loss.detach(), current.grad, metrics


def ours(batch, mode, *, config=None, scale=1.0, **more):
    """The same by ``actor_loss`` on the whole batch, with its own counts."""
    aggregation = {"type": AGGREGATIONS[mode]}
    if mode == "seq-mean-token-sum-norm":
        aggregation["max_length"] = batch["log_prob"].shape[1]
    surrogate = {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    current = batch["log_prob"].clone().requires_grad_()
    loss = (
        scale
        * actor_loss(
            config or ActorLossConfig.from_dict({"surrogate": surrogate, "aggregation": aggregation}),
            curr_logprobs=current,
            prev_logprobs=batch["old_log_prob"],
            advantages=batch["advantages"],
            response_mask=batch["response_mask"],
            **more,
        ).loss
    )
    loss.backward()
    return loss.detach(), current.grad


@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_microbatches_and_ranks_add_up_to_one_process(mode, excluding, settings):
    """Two data-parallel ranks of two microbatches, each loss with the global counts; DDP takes the mean over ranks."""
    settings(FILTER)
    batch = rows(8, excluding=excluding)
    loss, gradient = ours(batch, mode)
    config = actor_options(global_batch_info={**counts(batch), "dp_size": 2})
    parts = [
        theirs({name: values[start : start + 2] for name, values in batch.items()}, config, mode)
        for start in range(0, 8, 2)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts) / 2, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]) / 2, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tensor", ["log_prob", "old_log_prob"])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_excluded_token_leaves_the_others_as_if_it_were_deleted(mode, tensor, settings):
    settings(FILTER)
    excluded, deleted = rows(4), rows(4)
    config = actor_options(global_batch_info=counts(excluded))
    excluded[tensor][0, 2] = -torch.inf
    deleted["response_mask"][0, 2] = False
    (loss, gradient, metrics), (loss_without, gradient_without, _) = (
        theirs(excluded, config, mode),
        theirs(deleted, config, mode),
    )
    torch.testing.assert_close(loss, loss_without, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, gradient_without, rtol=1e-12, atol=1e-14)
    assert metrics["actor/policy_support_excluded_tokens"] == 1.0
    assert all(isinstance(value, float) for value in metrics.values())


def test_without_a_filter_in_the_settings_minus_infinity_is_a_fault(settings):
    with pytest.raises(LogprobFault, match="prev_logprobs at token"):
        theirs(rows(4, excluding=True), actor_options(), "token-mean")


def test_weights_of_verl_multiply_the_surrogate():
    batch = rows(4)
    weights = torch.rand(batch["log_prob"].shape, dtype=torch.float64) + 0.5
    found = theirs(batch, actor_options(), "token-mean", rollout_is_weights=weights)
    loss, gradient = ours(batch, "token-mean", correction_weights=weights)
    torch.testing.assert_close(found[0], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1], gradient, rtol=1e-12, atol=1e-16)


def test_a_loss_of_the_settings_replaces_verls_options_and_reads_the_engines_log_probabilities(settings):
    settings("loss: {surrogate: {type: cispo}, correction: {type: tis, low: 0.5, high: 2.0}}\n")
    batch = rows(4)
    engine = batch["old_log_prob"] - 0.1
    found = theirs(batch, actor_options(), "token-mean", rollout_log_probs=engine)
    config = ActorLossConfig.from_dict(
        {"surrogate": {"type": "cispo"}, "correction": {"type": "tis", "low": 0.5, "high": 2.0}}
    )
    loss, gradient = ours(batch, "token-mean", config=config, generation_logprobs=engine)
    torch.testing.assert_close(found[0], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1], gradient, rtol=1e-12, atol=1e-16)
    with pytest.raises(ConfigurationError, match="both correct for the engine"):
        theirs(batch, actor_options(), "token-mean", rollout_log_probs=engine, rollout_is_weights=engine)


@pytest.mark.parametrize(
    ("changes", "loss", "mode", "message"),
    [
        ({}, None, "median", "loss_agg_mode must be one of token-mean, .* got 'median'"),
        (
            {"use_kl_loss": True, "kl_loss_type": "k3+"},
            None,
            "token-mean",
            r"kl_loss_type must be one of .* got 'k3\+'",
        ),
        ({}, {"aggregation": {"type": "token_sum"}}, "token-mean", "loss.aggregation must be 'token_mean'"),
        ({}, {"normalization": "survivors"}, "token-mean", "must be 'rollout' in verl"),
        ({}, {"positive_nll_coef": 0.1}, "token-mean", "must be 0 in verl"),
    ],
)
def test_options_without_a_counterpart_are_errors(changes, loss, mode, message):
    chosen = AdapterSettings(loss=None if loss is None else ActorLossConfig.from_dict(loss))
    with pytest.raises(ConfigurationError, match=message):
        loss_config(actor_options(**changes), chosen, loss_agg_mode=mode, length=4, whole=True)


def test_terms_that_verl_adds_itself_are_refused_in_the_policy_loss():
    chosen = AdapterSettings(loss=ActorLossConfig.from_dict({"kl": {"coef": 0.1}}))
    with pytest.raises(ConfigurationError, match="must be off where verl computes these terms itself"):
        loss_config(actor_options(), chosen, loss_agg_mode="token-mean", length=4, whole=False)


def test_options_of_verl_become_terms():
    options = actor_options(use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="low_var_kl", entropy_coeff=0.01)
    found = loss_config(options, AdapterSettings(), loss_agg_mode="seq-mean-token-sum-norm", length=7, whole=True)
    assert found == ActorLossConfig.from_dict(
        {
            "surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
            "aggregation": {"type": "dr_grpo", "max_length": 7},
            "entropy_coef": 0.01,
            "kl": {"coef": 0.2, "type": "k3", "input_clamp": 20.0, "output_clamp": 10.0},
        }
    )


@pytest.mark.parametrize(("kind", "name"), [("tokens", "batch_num_tokens"), ("sequences", "global_batch_size")])
def test_a_missing_global_count_is_an_error_on_several_ranks(kind, name):
    with pytest.raises(ConfigurationError, match=f"'{name}'. must be set where dp_size is 2, got None"):
        divisors({"dp_size": 2}, kind)
    assert divisors({}, kind).data_size == 1
    assert divisors({"dp_size": 2}, "none").data_size == 2


def engine(**config):
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(vocab_size=29)), **config)


def head(settings, temperature, **options):
    logits = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    labels = logits[..., :29].argsort(-1, descending=True)[..., [0, 1, 2, 10, 20, 28]].diagonal(dim1=-2, dim2=-1)
    found = head_logprobs(
        engine(), logits, labels, temperature, settings, calculate_entropy=True, data_format="thd", **options
    )
    return logits, labels, found


def test_the_head_filters_with_verls_temperature_and_the_settings_top_k_and_top_p():
    settings = AdapterSettings.from_dict({"sampling": {"top_k": 8, "top_p": 0.99}})
    temperature = torch.full((1, 6), 0.8)
    temperature[0, -1] = 0.0  # padding
    logits, labels, found = head(settings, temperature)
    wanted = support_logprobs(
        logits[0, :-1], labels[0, :-1], SamplingParams(0.8, top_k=8, top_p=0.99), vocab_size=29, entropy=True
    )
    torch.testing.assert_close(found["log_probs"][0, :-1], wanted.filtered, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["log_probs_unfiltered"][0, :-1], wanted.unfiltered, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["entropy"][0, :-1], wanted.entropy, rtol=1e-6, atol=1e-6)
    assert torch.isneginf(found["log_probs"]).tolist() == [[False, False, False, True, True, True]]
    with torch.no_grad():
        assert head(settings, temperature)[2].keys() == {"log_probs", "entropy"}


@pytest.mark.parametrize("name", ["calculate_sum_pi_squared", "distillation_use_topk"])
def test_the_head_refuses_what_it_does_not_return(name):
    settings = AdapterSettings.from_dict({"sampling": {"top_k": 8}})
    with pytest.raises(ConfigurationError, match=f"{name} must be off"):
        head(settings, torch.ones(1, 6), **{name: True})


def test_a_temperature_in_the_settings_is_refused():
    settings = AdapterSettings.from_dict({"sampling": {"top_k": 8, "temperature": 0.5}})
    with pytest.raises(ConfigurationError, match=r"sampling\.temperature must be left out in verl, .* got 0\.5"):
        head(settings, torch.ones(1, 6))


def test_the_name_in_the_registry():
    assert LOSS_MODE == "policy_support"
