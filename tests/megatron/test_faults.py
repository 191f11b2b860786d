"""A fault stops every rank with the same message before anything is updated; nothing valid is no fault."""

from dataclasses import replace

import pytest
import torch

from megatron_support.errors import GradientFault, LogprobFault
from tests.megatron.actor_setup import make_rollouts, make_step
from tests.ranks import run_ranks

ON_POLICY = {"surrogate": {"type": "on_policy"}}
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context": 2}),
}


def _fault(step, rollouts, kind=LogprobFault):
    """(message, whether a parameter changed) of a step that must fail."""
    parameters = [p for chunk in step.model.chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(kind) as caught:
        step.step(rollouts)
    same = all(torch.equal(p, b) or bool(torch.isnan(b).any()) for p, b in zip(parameters, before, strict=True))
    return str(caught.value), not same


def _bad_column(rank, world, parallel, value):
    rollouts = make_rollouts()
    generation = rollouts.generation_logprobs.clone()
    generation[int(rollouts.cu_seqlens[5]) + 4] = value
    return _fault(make_step(parallel=parallel), replace(rollouts, generation_logprobs=generation))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "dp2"])
def test_fault_in_the_data_names_sample_token_and_value(layout, value):
    world, parallel = LAYOUTS[layout]
    for message, changed in run_ranks(world, _bad_column, parallel, value, timeout=60):
        assert f"generation_logprobs of sample '1-1', token 4 is {value}" in message
        assert not changed


def _bad_weights(rank, world, parallel):
    """One row of the output layer is NaN on the rank that holds it: current log-probabilities are NaN."""
    step = make_step(parallel=parallel, loss=ON_POLICY)
    for chunk in step.model.bare_chunks:
        if chunk.post_process:
            with torch.no_grad():
                chunk.shared_embedding_or_output_weight()[3] = float("nan")
    return _fault(step, make_rollouts())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_in_the_current_pass_is_raised_on_every_rank(layout):
    world, parallel = LAYOUTS[layout]
    results = run_ranks(world, _bad_weights, parallel, timeout=60)
    assert len({message for message, _ in results}) == 1
    message, _ = results[0]
    assert "curr_logprobs of sample" in message and "is nan" in message and "(rank " in message
    assert not any(changed for _, changed in results)


def _bad_gradient(rank, world, parallel):
    """A gradient turns NaN on its way back on the last rank only; all log-probabilities are finite."""
    step = make_step(parallel=parallel)
    if rank == world - 1:
        next(step.model.bare_chunks[0].parameters()).register_hook(lambda grad: grad * float("nan"))
    return _fault(step, make_rollouts(), GradientFault)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_that_is_not_finite_updates_nothing(layout):
    world, parallel = LAYOUTS[layout]
    for message, changed in run_ranks(world, _bad_gradient, parallel, timeout=60):
        assert "gradient norm must be finite, got nan" in message
        assert not changed


def _nothing_valid(rank, world, parallel, microbatch):
    step = make_step(parallel=parallel, microbatch=microbatch)
    parameters = [p for chunk in step.model.chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    rollouts = make_rollouts()
    metrics = step.step(replace(rollouts, sample_mask=torch.zeros_like(rollouts.sample_mask))).metrics
    return metrics, all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_valid_is_loss_zero_and_a_skipped_update(layout):
    world, parallel = LAYOUTS[layout]
    for metrics, unchanged in run_ranks(world, _nothing_valid, parallel, {"max_tokens": 64}, timeout=60):
        assert metrics["loss"] == 0
        assert metrics["skipped_updates"] == 2, "one for each minibatch"
        assert unchanged


def _one_valid_sequence(rank, world, parallel):
    rollouts = make_rollouts()
    mask = torch.zeros_like(rollouts.sample_mask)
    mask[0] = True
    return make_step(parallel=parallel).step(replace(rollouts, sample_mask=mask)).metrics


def test_ranks_and_microbatches_without_a_valid_token_change_nothing():
    """One sequence of twelve is valid: at DP=2 a rank has none at all."""
    (expected,) = run_ranks(1, _one_valid_sequence, {})
    for metrics in run_ranks(2, _one_valid_sequence, {}, timeout=60):
        for name in ("loss", "grad_norm", "valid_tokens", "policy_support_excluded_tokens"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5)
    assert expected["skipped_updates"] == 1, "the minibatch without a valid token"
