"""Missing and misshapen tensors, faults and how they are named, user surrogates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_support.config import ActorLossConfig
from megatron_support.errors import ConfigurationError
from megatron_support.loss import (
    SurrogateInputs,
    SurrogateOutput,
    actor_loss,
    describe_faults,
    find_faults,
    register_surrogate,
)
from megatron_support.loss.surrogates import SURROGATES
from tests.loss_batch import INF, config, flat, gradients, random_batch, with_gradients

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("ppo_clip", "prev_logprobs"),
        ("full", "generation_logprobs"),
        ("kl_on_policy", "generation_logprobs"),
        ("kl_k1", "reference_logprobs"),
        ("kl_k1", "curr_logprobs_unfiltered"),
        ("entropy", "entropy"),
        ("positive_nll", "rewards"),
        ("error_threshold", "generation_logprobs"),
        ("opsm", "prev_logprobs"),
    ],
)
def test_a_tensor_that_a_term_reads_must_be_given(name, missing):
    batch = {key: value for key, value in random_batch(1).items() if key != missing}
    with pytest.raises(ConfigurationError, match=f"{missing} is read by .* and must be given, got None; pass it"):
        actor_loss(config(name), **batch)


@pytest.mark.parametrize("name", ["reinforce", "on_policy"])
def test_a_tensor_that_no_term_reads_may_be_missing(name):
    read = ("curr_logprobs", "advantages", "response_mask")
    batch = {key: value for key, value in random_batch(1).items() if key in read}
    assert torch.isfinite(actor_loss(config(name), **batch).loss)


def test_unfiltered_logprobs_are_the_current_ones_without_a_filter():
    batch = random_batch(1)
    batch["curr_logprobs_unfiltered"] = batch["curr_logprobs"]
    expected = actor_loss(config("kl_k3"), **batch).loss
    del batch["curr_logprobs_unfiltered"]
    assert actor_loss(config("kl_k3"), **batch, filtered=False).loss == expected


def test_on_policy_ignores_the_previous_logprobs():
    batch = random_batch(1)
    expected = actor_loss(config("on_policy"), **batch)
    batch["prev_logprobs"] = torch.full_like(batch["prev_logprobs"], -INF)
    actual = actor_loss(config("on_policy"), **batch)
    assert actual.loss == expected.loss and actual.surviving_tokens == expected.surviving_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.ones(4)}, r"advantages must have the shape of curr_logprobs \(4, 7\), got \(4,\)"),
        ({"prev_logprobs": torch.ones(4, 6)}, r"prev_logprobs must have the shape .* got \(4, 6\)"),
        ({"sample_mask": torch.ones(3)}, r"sample_mask must have one entry per sequence, shape \(4,\), got \(3,\)"),
        ({"rewards": torch.ones(4, 7)}, r"rewards must have one entry per sequence, shape \(4,\), got \(4, 7\)"),
        ({"filtered": torch.ones(5)}, r"filtered must have one entry per sequence, shape \(4,\), got \(5,\)"),
        ({"sequence_ids": torch.zeros(4)}, r"sequence_ids must have the shape of curr_logprobs .* one id per token"),
        ({"metrics": "some"}, "metrics must be 'full' or 'minimal', got 'some'; use one of them"),
        ({"metrics": "full", "correction_weights": torch.ones(4, 7)}, "correction_weights must be None with"),
    ],
)
def test_a_misshapen_argument_is_named(change, message):
    with pytest.raises(ConfigurationError, match=message):
        actor_loss(config("full"), **{**random_batch(1), **change})


def test_flat_tokens_need_sequence_ids():
    with pytest.raises(ConfigurationError, match="pass sequence_ids with flat tokens"):
        actor_loss(config("reinforce"), **{k: v.reshape(-1) for k, v in random_batch(1).items()})


def test_faults_are_counted_by_name_and_described():
    batch = random_batch(2)
    batch["curr_logprobs"][3, 1] = NAN
    batch["prev_logprobs"][0, 1] = INF
    batch["generation_logprobs"][3, 1] = 0.5
    batch["generation_logprobs"][0, 1] = -INF  # excluded, were it not for the +inf beside it
    batch["curr_logprobs"][1, 0] = NAN  # masked
    batch["reference_logprobs"][0, 1] = -INF
    found = find_faults(config("kl_k3"), **batch)
    counts = {name: int(count) for name, count in found.by_name.items()}
    assert counts == {
        "curr_logprobs": 1,
        "prev_logprobs": 1,
        "generation_logprobs": 1,
        "reference_logprobs": 1,
        "curr_logprobs_unfiltered": 0,
        "advantages": 0,
    }
    assert found.total == 4
    first, second, third, fourth = describe_faults(config("kl_k3"), **batch)
    assert (first.name, first.position, first.sequence) == ("curr_logprobs", 22, 3)
    assert first.value != first.value
    assert str(second).startswith("prev_logprobs at token 1 of sequence 0 is inf, it must be finite, or -inf for a")
    assert (third.name, third.value) == ("generation_logprobs", 0.5) and "<= 0" in third.rule
    assert (fourth.name, fourth.value, fourth.sequence) == ("reference_logprobs", -INF, 0)


def test_minus_infinity_is_a_fault_where_filtering_is_inactive():
    batch = random_batch(2)
    batch["prev_logprobs"][0, 1] = batch["prev_logprobs"][3, 1] = -INF
    filtered = torch.tensor([False, True, True, True])
    assert find_faults(config("ppo_clip"), **batch).total == 0
    assert find_faults(config("ppo_clip"), **batch, filtered=filtered).total == 1
    assert find_faults(config("ppo_clip"), **batch, filtered=False).total == 2
    assert find_faults(config("on_policy"), **batch, filtered=False).total == 0
    tokens = flat({**batch}, torch.arange(28))
    (fault,) = describe_faults(config("ppo_clip"), **tokens, filtered=filtered)
    assert (fault.position, fault.sequence, fault.value) == (1, 0, -INF)


def test_at_most_a_few_faults_of_each_tensor_are_described():
    batch = random_batch(2)
    batch["curr_logprobs"][:] = NAN
    assert len(describe_faults(config("ppo_clip"), **batch, limit=3)) == 3


def test_a_registered_surrogate_is_configured_and_used():
    @register_surrogate("test_squared")
    def squared(inputs: SurrogateInputs, *, strength: float, offset: float = 0.0) -> torch.Tensor:
        return -inputs.ratio * inputs.advantages + strength * inputs.log_ratio.square() + offset

    chosen = ActorLossConfig.from_dict({"surrogate": {"type": "test_squared", "strength": 0.5}})
    batch = with_gradients(random_batch(4))
    actual = actor_loss(chosen, **batch)
    valid = batch["response_mask"] & batch["sample_mask"][:, None]
    log_ratio = batch["curr_logprobs"] - batch["prev_logprobs"]
    per_token = -log_ratio.exp() * batch["advantages"] + 0.5 * log_ratio.square()
    torch.testing.assert_close(actual.loss, per_token[valid].sum() / valid.sum())
    assert (gradients(actual.loss, batch)["curr_logprobs"][~valid] == 0).all()
    for data, message in (
        ({"strength": 0.5, "strenth": 1}, "surrogate.strenth: unknown field of surrogate 'test_squared'"),
        ({}, "surrogate.strength: required by surrogate 'test_squared' and missing; add it"),
        ({"strength": [1]}, r"surrogate.strength: must be a number, a string or null, got \[1\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ActorLossConfig.from_dict({"surrogate": {"type": "test_squared", **data}})


@pytest.mark.parametrize(
    ("name", "replaced", "low", "high", "clamped"),
    [
        ("advantages", lambda inputs: ({"advantages": inputs.advantages + 0.5}, {}), 0.0, 1.0, 1.2),
        ("window", lambda inputs: ({}, {"window": (0.5, 4.0)}), 0.0, 1.0, math.e),
        ("ratio", lambda inputs: ({}, {"ratio": 0.35 * inputs.ratio.detach()}), 1.0, 0.0, 0.35 * math.e),
        ("clipped", lambda inputs: ({}, {"clipped": inputs.ratio > 0}), 0.0, 1.0, 1.2),
    ],
)
def test_a_surrogate_on_top_of_ppo_reports_what_it_did(name, replaced, low, high, clamped):
    """One token with r = e and A = -0.2, or 1, under ppo_clip of other advantages, or with its report replaced."""

    @register_surrogate(f"test_on_top_{name}")
    def on_top(inputs: SurrogateInputs) -> SurrogateOutput:
        of_inputs, of_output = replaced(inputs)
        return replace(SURROGATES["ppo_clip"](replace(inputs, **of_inputs), clip_low=0.2, clip_high=0.2), **of_output)

    output = actor_loss(
        ActorLossConfig.from_dict({"surrogate": {"type": f"test_on_top_{name}"}}),
        curr_logprobs=torch.tensor([[-1.0]], dtype=torch.float64),
        prev_logprobs=torch.tensor([[-2.0]], dtype=torch.float64),
        advantages=torch.tensor([[1.0 if name in ("window", "ratio") else -0.2]], dtype=torch.float64),
        response_mask=torch.ones(1, 1),
    )
    values = output.metrics.compute()
    assert (values["clip_fraction_low"], values["clip_fraction_high"]) == (low, high)
    assert values["probs_ratio_clamped"] == pytest.approx(clamped)


def test_masked_tokens_stay_out_of_a_surrogate_on_top_of_ppo():
    """Every ratio is 1, A = 1 + 0.5 at the one token of four that takes part, and 0 + 0.5 at the others."""

    @register_surrogate("test_shifted")
    def shifted(inputs: SurrogateInputs) -> SurrogateOutput:
        moved = replace(inputs, advantages=inputs.advantages + 0.5)
        return SURROGATES["ppo_clip"](moved, clip_low=0.2, clip_high=0.2)

    curr = torch.tensor([[-1.0, -2.0, -INF, -1.5]], requires_grad=True)
    output = actor_loss(
        ActorLossConfig.from_dict({"surrogate": {"type": "test_shifted"}, "normalization": "survivors"}),
        curr_logprobs=curr,
        prev_logprobs=curr.detach(),
        advantages=torch.ones(1, 4),
        response_mask=torch.tensor([[1, 0, 1, 0]]),
    )
    output.loss.backward()
    assert output.loss.item() == -1.5
    assert curr.grad.tolist() == [[-1.5, 0.0, 0.0, 0.0]]


def test_a_surrogate_may_report_clipping():
    @register_surrogate("test_reporting")
    def reporting(inputs: SurrogateInputs) -> SurrogateOutput:
        ratio = inputs.ratio.detach()
        return SurrogateOutput(
            loss=-inputs.ratio * inputs.advantages, ratio=ratio, window=(0.0, 1.0), clipped=ratio > 1
        )

    output = actor_loss(ActorLossConfig.from_dict({"surrogate": {"type": "test_reporting"}}), **random_batch(4))
    values = output.metrics.compute()
    assert values["clip_fraction_high"] > 0 and values["clip_fraction_low"] == 0
    assert values["probs_ratio_clamped_max"] == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [("ppo_clip", "built in"), ("two words", "must be an identifier"), ("test_taken", "already registered")],
)
def test_a_taken_name_is_refused(name, message):
    if name == "test_taken" and "test_taken" not in _TAKEN:
        _TAKEN.append(name)
        register_surrogate(name)(lambda inputs: inputs.ratio)
    with pytest.raises(ConfigurationError, match=message):

        @register_surrogate(name)
        def mine(inputs: SurrogateInputs) -> torch.Tensor:
            return inputs.ratio


_TAKEN: list[str] = []
