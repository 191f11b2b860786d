"""What each advantage estimator and surrogate makes the step compute, under a filter."""

from dataclasses import replace

import pytest
import torch

from megatron_support.errors import ConfigurationError, RolloutError
from tests.megatron.actor_setup import make_rollouts, make_step
from tests.ranks import run_ranks

ESTIMATORS = {
    "grpo": {"type": "grpo", "leave_one_out": True},
    "rloo": {"type": "rloo"},
    "reinforce_pp": {"type": "reinforce_pp", "kl_in_reward": {"coef": 0.1}},
    "gae": {"type": "gae"},
    "opd": {"type": "opd"},
    "gdpo": {"type": "gdpo"},
}


def _rollouts():
    rollouts = make_rollouts()
    generator = torch.Generator().manual_seed(1)
    tokens, sequences = rollouts.tokens.numel(), rollouts.num_sequences
    return replace(
        rollouts,
        values=torch.rand(tokens, generator=generator),
        teacher_logprobs=-torch.rand(tokens, generator=generator),
        reward_components=torch.rand(sequences, 2, generator=generator),
    )


def _step(rank, world, advantages, parallel):
    step = make_step(loss={"surrogate": {"type": "reinforce"}}, parallel=parallel, advantages=advantages)
    result = step.step(_rollouts())
    return result.metrics, result.rollouts


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_trains_and_every_rank_has_its_advantages(name):
    ((metrics, rollouts),) = run_ranks(1, _step, ESTIMATORS[name], {})
    assert metrics["grad_norm"] > 0
    advantages = rollouts.advantages
    assert torch.isfinite(advantages).all() and (advantages[~rollouts.response_mask] == 0).all()
    assert (advantages != 0).any()
    for other_metrics, other in run_ranks(2, _step, ESTIMATORS[name], {"pipeline": 2}):
        torch.testing.assert_close(other.advantages, advantages, rtol=1e-5, atol=1e-6)
        assert other_metrics["loss"] == pytest.approx(metrics["loss"], rel=2e-5)


def test_a_column_that_is_missing_is_named():
    def run(rank, world):
        with pytest.raises(RolloutError, match="values"):
            make_step(advantages=ESTIMATORS["gae"]).step(make_rollouts())

    run_ranks(1, run)


def test_passes_run_only_where_something_reads_them():
    def run(rank, world, loss, advantages):
        return make_step(loss=loss, advantages=advantages).step(_rollouts()).rollouts

    (on_policy,) = run_ranks(1, run, {"surrogate": {"type": "on_policy"}}, {"type": "grpo"})
    assert on_policy.prev_logprobs is None and on_policy.reference_logprobs is None
    (distilled,) = run_ranks(1, run, {"surrogate": {"type": "on_policy"}}, {"type": "opd"})
    assert distilled.prev_logprobs is not None and distilled.reference_logprobs is None
    (penalised,) = run_ranks(1, run, {}, ESTIMATORS["reinforce_pp"])
    assert penalised.reference_logprobs is not None


def test_a_kl_term_without_a_reference_is_refused():
    def run(rank, world):
        step = make_step()
        with pytest.raises(ConfigurationError, match="reference=HostWeights"):
            type(step)(step.model, step.optimizer, None, step.config, groups=step.groups)

    run_ranks(1, run)


def _filtered_step(rank, world, parallel, sequence_filter):
    loss = {"surrogate": {"type": "on_policy"}}  # nothing but the filter reads previous log-probabilities
    step = make_step(loss=loss, parallel=parallel, sequence_filter=sequence_filter, minibatches=1)
    result = step.step(make_rollouts())
    return result.metrics, result.rollouts.sample_mask, result.rollouts.response_mask


@pytest.mark.parametrize("world, parallel", [(1, {}), (2, {"pipeline": 2}), (2, {})])
def test_filtered_sequences_leave_before_the_counts_on_every_layout(world, parallel):
    """Engine log-probabilities are random here, so errors spread widely around their median."""
    chosen = {"max_logprob_error": 5.0, "max_response_tokens": 9}
    ((unfiltered, everyone, response),) = run_ranks(1, _filtered_step, {}, {})
    for metrics, kept, _ in run_ranks(world, _filtered_step, parallel, chosen):
        assert metrics["long_responses"] > 0 and metrics["rejected_sequences"] > 0
        assert (everyone & ~kept).sum() == metrics["long_responses"] + metrics["rejected_sequences"]
        assert metrics["num_valid_samples"] == kept.sum() > 0
        assert metrics["valid_tokens"] < unfiltered["valid_tokens"] == response.sum()
        assert metrics["sequence_error_max_after"] <= 5.0 < metrics["sequence_error_max_before"]
