"""One actor step under any layout is the actor step of one process."""

from dataclasses import replace

import pytest
import torch

from megatron_support.loss import actor_loss
from megatron_support.megatron.minibatch import PlannedMicrobatches, prepare_minibatch
from tests.megatron.actor_setup import KL_GSPO, make_rollouts, make_step
from tests.ranks import run_ranks

STEPS = 2
SAME = ("loss", "grad_norm", "kl_penalty", "policy_support_excluded_tokens", "probs_ratio", "lr")

FUSED = {"fused_head": True}

LAYOUTS = {
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "tp2_sp": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "pp2_vpp2": (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    "cp2": (2, {"parallel": {"context": 2}}),
    "dp2": (2, {}),
    "dp2_distributed_optimizer": (2, {"optimizer": {"distributed": True}}),
    "dp2_overlap": (2, {"optimizer": {"overlap_grad_reduce": True}}),
    "dp2_distributed_optimizer_overlap": (
        2,
        {"optimizer": {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}},
    ),
    "padded": (1, {"microbatch": {"max_tokens": 40, "layout": "padded"}}),
    "one_microbatch": (1, {"microbatch": {"max_tokens": 4096}}),
    "every_position": (1, {"logprobs": {"response_only": False}}),
    "fused_head": (1, {"logprobs": FUSED}),
    "fused_head_tp2": (2, {"logprobs": FUSED, "parallel": {"tensor": 2}}),
    "fused_head_tp2_sp_padded": (
        2,
        {
            "logprobs": FUSED,
            "parallel": {"tensor": 2, "sequence": True},
            "microbatch": {"max_tokens": 40, "layout": "padded"},
        },
    ),
    "fused_head_pp2_vpp2": (2, {"logprobs": FUSED, "parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    "tp2_pp2": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "pp2_dp2_padded": (4, {"parallel": {"pipeline": 2}, "microbatch": {"max_tokens": 40, "layout": "padded"}}),
}


def _train(rank, world, setup):
    step = make_step(**setup)
    rollouts = make_rollouts()
    rollouts = replace(rollouts, rewards=rollouts.rewards - 0.5)  # positive samples, and others
    history = []
    for _ in range(STEPS):
        result = step.step(rollouts)
        history.append(result.metrics)
    return history, result.rollouts.prev_logprobs


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(1, _train, {})[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_as_one_process_does(one_process, name):
    world, setup = LAYOUTS[name]
    history, previous = one_process
    for other_history, other_previous in run_ranks(world, _train, setup):
        for step, other in zip(history, other_history, strict=True):
            got = {key: other[key] for key in SAME}
            assert got == pytest.approx({key: step[key] for key in SAME}, rel=2e-5, abs=1e-7)
        assert torch.equal(torch.isneginf(other_previous), torch.isneginf(previous))
        torch.testing.assert_close(other_previous, previous, rtol=2e-5, atol=2e-5)


def _three_microbatches(rank, world, parallel):
    step = make_step(parallel=parallel, minibatches=1, microbatch={"max_tokens": 32}, optimizer={"clip_grad": 0.0})
    rollouts = make_rollouts(length=(16, 17)).select(torch.arange(6))
    minibatch = prepare_minibatch(
        rollouts,
        microbatch=step.config.microbatch,
        groups=step.groups,
        device=step.model.device,
        virtual_pipeline=step.model.virtual_pipeline,
    )
    metrics = step.step(rollouts).metrics
    return len(minibatch), {key: metrics[key] for key in SAME}


def test_three_microbatches_are_filled_up_to_four_for_two_stages_of_two_chunks():
    """The interleaved schedule needs a multiple of the pipeline size; an empty microbatch changes nothing."""
    (plain, expected), *_ = run_ranks(1, _three_microbatches, {})
    assert plain == 3
    for parallel, count in (({"pipeline": 2}, 3), ({"pipeline": 2, "virtual_pipeline": 2}, 4)):
        for found, metrics in run_ranks(2, _three_microbatches, parallel):
            assert found == count
            assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-7)


def _microbatches(rank, world, parallel):
    step = make_step(parallel=parallel, microbatch={"max_tokens": 32})
    rollouts = make_rollouts(length=(5, 17))
    minibatch = prepare_minibatch(
        rollouts, microbatch=step.config.microbatch, groups=step.groups, device=step.model.device
    )
    built = list(minibatch.microbatches)
    again = [minibatch.microbatches[number] for number in range(len(minibatch))]
    for first, second in zip(built, again, strict=True):
        assert first is not second and torch.equal(first.token_index, second.token_index)
        assert first.targets.numel() == minibatch.tokens_held
    assert len(minibatch.microbatches[1:]) == len(minibatch) - 1
    held = torch.cat([batch.token_index[batch.response_mask] for batch in built])
    counts = (minibatch.valid_tokens, minibatch.valid_sequences, minibatch.positive_tokens)
    in_use = rollouts.response_mask & rollouts.sample_mask[rollouts.sequence_ids]
    positive = in_use & (rollouts.rewards > 0)[rollouts.sequence_ids]
    sequences = rollouts.sequence_ids[in_use].unique().numel()
    return held, counts, (int(in_use.sum()), sequences, int(positive.sum())), rollouts.response_mask.nonzero().flatten()


@pytest.mark.parametrize("parallel", [{"data": 2}, {"context": 2}], ids=str)
def test_microbatches_are_built_on_demand_and_hold_every_response_token_once(parallel):
    found = run_ranks(2, _microbatches, {name: size for name, size in parallel.items() if name != "data"})
    for _, counts, expected, _ in found:
        assert counts == expected
    assert torch.equal(torch.cat([held for held, *_ in found]).sort().values, found[0][-1])


def test_an_error_in_building_a_microbatch_is_not_the_end_of_a_minibatch():
    def build(indices):
        raise IndexError("index out of range in self")

    with pytest.raises(IndexError, match="out of range"):
        list(PlannedMicrobatches([torch.arange(2)], build))


def _weights_after_two_updates(rank, world, optimizer):
    step = make_step(optimizer=optimizer)
    step.step(make_rollouts())
    return [parameter.detach().clone() for chunk in step.model.chunks for parameter in chunk.parameters()]


def test_weights_are_whole_on_every_rank_when_a_step_that_overlaps_their_gathering_ends():
    """Reference policy, sampler and checkpoints read them without a forward pass of the trained model."""
    overlap = {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    expected = run_ranks(2, _weights_after_two_updates, {"distributed": True})
    for weights, other in zip(expected, run_ranks(2, _weights_after_two_updates, overlap), strict=True):
        for tensor, same in zip(weights, other, strict=True):
            assert torch.equal(tensor, same)


def test_rollouts_hold_tokens_outside_the_support(one_process):
    """Otherwise the comparison above says nothing about validity."""
    history, previous = one_process
    assert torch.isneginf(previous).sum() > 10
    assert history[0]["policy_support_excluded_tokens"] >= torch.isneginf(previous).sum()


SURVIVORS = {
    "nothing": KL_GSPO | {"normalization": "survivors", "aggregation": {"type": "token_sum"}},
    "tokens": KL_GSPO | {"normalization": "survivors"},
    "sequences": KL_GSPO | {"normalization": "survivors", "aggregation": {"type": "sequence_mean"}},
    "two_counts": KL_GSPO | {"normalization": "survivors", "positive_nll_coef": 0.5},
    "positive_tokens": KL_GSPO
    | {"normalization": "survivors", "aggregation": {"type": "token_sum"}, "positive_nll_coef": 0.5},
}


@pytest.fixture(scope="module")
def survivors_in_one_process():
    return {name: run_ranks(1, _train, {"loss": loss})[0][0] for name, loss in SURVIVORS.items()}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("parallel", [{}, {"context": 2}, {"pipeline": 2}], ids=["dp2", "cp2", "pp2"])
@pytest.mark.parametrize("count", SURVIVORS)
def test_survivors_divide_by_one_global_count(survivors_in_one_process, count, parallel, per_token):
    """In both modes of Megatron's ``calculate_per_token_loss``."""
    expected = survivors_in_one_process[count]
    setup = {"loss": SURVIVORS[count], "parallel": parallel, "per_token": per_token}
    for history, _ in run_ranks(2, _train, setup):
        for step, other in zip(expected, history, strict=True):
            assert {k: other[k] for k in SAME} == pytest.approx({k: step[k] for k in SAME}, rel=2e-5, abs=1e-7)


def _step_and_whole_batch(rank, world, loss):
    step = make_step(loss=loss, minibatches=1, microbatch={"max_tokens": 40}, keep_current=True)
    rollouts = make_rollouts()
    result = step.step(replace(rollouts, rewards=rollouts.rewards - 0.5))
    whole = result.rollouts
    expected = actor_loss(
        step.config.loss,
        curr_logprobs=whole.curr_logprobs,
        curr_logprobs_unfiltered=whole.curr_logprobs_unfiltered,
        prev_logprobs=whole.prev_logprobs,
        generation_logprobs=whole.generation_logprobs,
        reference_logprobs=whole.reference_logprobs,
        advantages=whole.advantages,
        response_mask=whole.response_mask,
        sequence_ids=whole.sequence_ids,
        sample_mask=whole.sample_mask,
        rewards=whole.rewards,
    )
    return result.metrics, float(expected.loss), expected.metrics.compute()


@pytest.mark.parametrize("count", SURVIVORS)
def test_loss_of_microbatches_is_that_of_the_whole_batch(count):
    """Two counts divide the loss where positive samples have a term of their own."""
    ((found, loss, metrics),) = run_ranks(1, _step_and_whole_batch, SURVIVORS[count])
    assert found["loss"] == pytest.approx(loss, rel=2e-5)
    if "positive_nll_coef" in SURVIVORS[count]:
        assert found["positive_nll_loss"] == pytest.approx(metrics["positive_nll_loss"], rel=2e-5)


def test_survivors_differ_from_rollout_counts(one_process, survivors_in_one_process):
    rollout, survivors = one_process[0][0], survivors_in_one_process["tokens"][0]
    assert rollout["policy_support_excluded_tokens"] > 0
    assert abs(survivors["loss"]) > abs(rollout["loss"]) * 1.05
