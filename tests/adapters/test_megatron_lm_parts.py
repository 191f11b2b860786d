"""What of the Megatron-LM adapter needs no Megatron-LM: microbatches, options, metrics, registration."""

from __future__ import annotations

import sys
import types
from argparse import Namespace

import pytest
import torch

from megatron_support import register, unregister
from megatron_support.adapters import registry
from megatron_support.adapters.context import AdapterSettings
from megatron_support.adapters.megatron_lm.logprobs import is_hooked
from megatron_support.adapters.megatron_lm.microbatch import rl_microbatch
from megatron_support.adapters.megatron_lm.options import Process, loss_config, rollout_sampling
from megatron_support.adapters.megatron_lm.step import check_model_losses, two_element_metrics
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.metrics import Max, Mean, MetricSet, Sum
from megatron_support.types import SamplingParams
from tests.adapters import megatron_rl_standin as standin

CPU = torch.device("cpu")
ARGS = {
    "grpo_clamp_eps_lower": 0.1,
    "grpo_clamp_eps_upper": 0.3,
    "grpo_kl_beta": 0.001,
    "grpo_entropy_term_weight": 0.0,
    "rl_inference_logprobs_is_correction": False,
    "rl_importance_sampling_truncation_coef": None,
    "rl_default_temperature": 1.0,
    "rl_default_top_k": -1,
    "rl_default_top_p": 0,
    "calculate_per_token_loss": False,
}


def args(**changes):
    return Namespace(**(ARGS | changes))


def settings(**loss):
    return AdapterSettings.from_dict({"loss": loss} if loss else {})


def test_a_row_is_about_the_token_after_each():
    batch = {
        "tokens": torch.tensor([[7, 8, 9, 3]]),
        "loss_mask": torch.tensor([[0.0, 0, 1, 1]]),
        "position_ids": torch.arange(4)[None],
        "advantages": torch.tensor([2.5]),
        "old_logprobs": torch.tensor([[-1.0, -2, -torch.inf]]),
        "ref_logprobs": None,
    }
    found = rl_microbatch(batch, device=CPU)
    assert found.targets.tolist() == [[8, 9, 3, -1]]
    assert found.response_mask.tolist() == [[False, True, True, False]]
    assert found.columns["prev_logprobs"].tolist() == [[-1, -2, -torch.inf, 0]]
    assert found.columns["advantages"].tolist() == [[2.5] * 4]
    assert set(found.columns) == {"prev_logprobs", "advantages"}
    assert found.counts().tolist() == [2, 1]
    shorter = rl_microbatch(batch | {"loss_mask": batch["loss_mask"][:, 1:]}, device=CPU)  # as bins have it
    assert torch.equal(shorter.response_mask, found.response_mask)


def test_a_packed_row_has_an_advantage_for_each_sequence_and_no_prediction_across_them():
    batch = {
        "tokens": torch.arange(8)[None],
        "loss_mask": torch.ones(1, 7),
        "position_ids": torch.arange(8)[None],
        "advantages": torch.tensor([1.0, 2.0]),
    }
    found = rl_microbatch(batch, device=CPU, spans=[(0, 3), (3, 4)])
    assert found.response_mask.tolist() == [[True, True, False, True, True, True, False, False]]
    assert found.columns["advantages"][found.response_mask].tolist() == [1, 1, 2, 2, 2]
    assert found.counts().tolist() == [5, 2]
    empty = rl_microbatch(batch | {"advantages": torch.zeros(0)}, device=CPU, spans=[])
    assert empty.counts().tolist() == [0, 0]
    assert not empty.response_mask.any()


def test_a_missing_column_is_named():
    with pytest.raises(ConfigurationError, match="got no position_ids, advantages"):
        rl_microbatch({"tokens": torch.ones(1, 2), "loss_mask": torch.ones(1, 2)}, device=CPU)


def test_grpo_options_are_a_loss():
    plain = loss_config(args(), settings())
    assert (plain.surrogate.clip_low, plain.surrogate.clip_high) == (0.1, 0.3)
    assert (plain.kl.coef, plain.kl.input_clamp, plain.kl.output_clamp) == (0.001, None, None)
    assert plain.correction is None
    assert loss_config(args(grpo_kl_beta=0.0), settings()).kl is None
    corrected = args(rl_inference_logprobs_is_correction=True)
    assert loss_config(corrected, settings()).correction.type == "full"
    corrected.rl_importance_sampling_truncation_coef = 2.0
    assert loss_config(corrected, settings()).correction.high == 2.0
    assert loss_config(args(), settings(surrogate={"type": "reinforce"})).surrogate.type == "reinforce"


@pytest.mark.parametrize(
    ("per_token", "loss", "message"),
    [
        (False, {"normalization": "survivors"}, "must be rollout without --calculate-per-token-loss"),
        (True, {"normalization": "survivors", "kl": {"coef": 0.1, "type": "k3"}}, "kl must be null"),
        (True, {"positive_nll_coef": 0.1}, "positive_nll_coef must be 0"),
    ],
)
def test_a_loss_that_megatron_lm_cannot_divide_is_refused(per_token, loss, message):
    with pytest.raises(ConfigurationError, match=message):
        loss_config(args(calculate_per_token_loss=per_token), settings(**loss))


def test_survivors_are_allowed_where_megatron_divides():
    assert loss_config(args(calculate_per_token_loss=True), settings(normalization="survivors")).kl is None


def test_filters_that_are_off_are_none():
    assert rollout_sampling(args(), settings()) == SamplingParams(1.0, None, 1.0)
    found = rollout_sampling(args(rl_default_top_k=5, rl_default_top_p=0.9, rl_default_temperature=0.7), settings())
    assert found == SamplingParams(0.7, 5, 0.9)
    stated = AdapterSettings.from_dict({"sampling": {"top_k": 3}})
    assert rollout_sampling(args(rl_default_top_k=5), stated) == SamplingParams(1.0, 3, 1.0)


def test_metrics_are_quotients_of_sums_over_microbatches_and_ranks():
    """Megatron-LM adds both elements up over 4 losses here, then divides."""
    one = MetricSet({"mean": Mean(6.0, 3), "count": Sum(5), "highest": Max(1.0)})
    other = MetricSet({"mean": Mean(2.0, 1), "count": Sum(1), "highest": Max(1.0)})
    pairs = [two_element_metrics(metrics, 4) for metrics in (one, other, other, other)]
    assert set(pairs[0]) == {"mean", "count"}
    sums = {name: sum(pair[name] for pair in pairs) for name in pairs[0]}
    assert {name: float(value[0] / value[1]) for name, value in sums.items()} == {"mean": 2.0, "count": 8.0}


@pytest.mark.parametrize(
    ("per_token", "changes", "message"),
    [
        (True, {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}, "calculate_per_token_loss must be off"),
        (False, {"mtp_num_layers": 1}, "mtp_num_layers must be null"),
    ],
)
def test_a_model_with_losses_of_its_own_is_refused(per_token, changes, message):
    none = {"num_moe_experts": None, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None, "mtp_num_layers": None}
    process = Process(args=args(calculate_per_token_loss=per_token), settings=settings(), groups=ParallelGroups())
    with pytest.raises(ConfigurationError, match=message):
        check_model_losses(Namespace(**(none | changes)), process)
    check_model_losses(Namespace(**none), process)


@pytest.fixture
def rl(monkeypatch):
    modules = {}
    module = standin.installed(modules)
    for name, value in (modules | {"megatron.training": types.ModuleType("megatron.training")}).items():
        monkeypatch.setitem(sys.modules, name, value)
    yield module
    unregister("megatron_lm")


def test_registering_twice_is_once_and_unregistering_gives_the_originals_back(rl):
    names = ("prepare_data_for_update", "compute_logprobs_batch")
    before = [getattr(rl, name) for name in names]
    assert not is_hooked()
    first = register("megatron_lm")["megatron_lm"]
    changed = [getattr(rl, name) for name in names]
    assert register("megatron_lm")["megatron_lm"] is first
    assert is_hooked()
    assert first.hooked == ("log-probability pass",)
    assert all(one is two for one, two in zip(changed, (getattr(rl, name) for name in names), strict=True))
    assert list(first.originals.values()) == before
    unregister("megatron_lm")
    assert all(one is two for one, two in zip(before, (getattr(rl, name) for name in names), strict=True))
    assert not is_hooked()


def test_the_first_pass_of_an_update_is_the_old_policys_and_the_second_the_references(rl, monkeypatch):
    from megatron_support.adapters.megatron_lm import logprobs

    monkeypatch.setattr(logprobs, "compute_logprobs_batch", lambda *args, filtered, **options: filtered)
    register("megatron_lm")
    columns = {"tokens": torch.ones(2, 3), "position_ids": torch.ones(2, 3)}
    for _ in range(2):
        assert rl.prepare_data_for_update(None, columns, None, 1, None) == [True, False]


def test_a_wheel_without_rl_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.training", types.ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, "megatron.rl", None)
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", None)
    report = register("megatron_lm")["megatron_lm"]
    unregister("megatron_lm")
    assert report.hooked == ()
    assert "megatron.rl.rl_utils is not importable" in report.declined["log-probability pass"]


@pytest.mark.parametrize(("host", "module"), [("megatron_lm", "megatron.training"), ("nemo_rl", "nemo_rl")])
def test_a_missing_host_is_a_report_and_an_error_only_by_name(host, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(registry, "HOSTS", (host,))
    report = register()[host]
    assert report.version is None
    assert f"{module} is not importable" in report.declined["everything"]
    with pytest.raises(ConfigurationError, match=f"{host} must be installed"):
        register(host)
