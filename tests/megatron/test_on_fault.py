"""What a fault does: raise, skip_sample (as if the sample were not there) or skip_step; always on all ranks alike."""

import math

import pytest
import torch

from megatron_support.errors import LogprobFault
from megatron_support.megatron.faults import FoundFaults, LeftOut
from megatron_support.rollouts.batch import RolloutBatch
from tests.megatron.actor_setup import make_rollouts, make_step
from tests.ranks import run_ranks

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context": 2}),
}
# an advantage that depends on its own sample alone, so that deleting another changes nothing but counts
ALONE = {
    "advantages": {"type": "reinforce_pp", "whiten": False},
    "minibatches": 1,
    "architecture": {"tie_embeddings": False},
}
ON_POLICY = {"surrogate": {"type": "on_policy"}}
FAULTY = 5


def parameters(step) -> dict[str, torch.Tensor]:
    return {
        f"{i}.{name}": p.detach().clone()
        for i, chunk in enumerate(step.model.bare_chunks)
        for name, p in chunk.named_parameters()
    }


def only_in(rollouts: RolloutBatch) -> tuple[int, int]:
    """A sequence, and a token that it alone holds and that is followed by a response token."""
    for sequence in range(rollouts.num_sequences):
        start, end = rollouts.cu_seqlens[sequence : sequence + 2].tolist()
        elsewhere = {*rollouts.tokens[:start].tolist(), *rollouts.tokens[end:].tolist()}
        for token in rollouts.tokens[start : end - 1].tolist():
            if token not in elsewhere:
                return sequence, token
    raise AssertionError("no token is in one sequence alone")


def poison(step, token: int) -> None:
    """The embedding of one token is NaN: all that follows it in its sequence is NaN, and nothing else."""
    for chunk in step.model.bare_chunks:
        if chunk.pre_process:
            weight = chunk.embedding.word_embeddings.weight
            row = token - step.groups.tensor_rank * weight.shape[0]
            if 0 <= row < weight.shape[0]:
                with torch.no_grad():
                    weight[row] = math.nan


def others(rollouts: RolloutBatch, sequence: int) -> RolloutBatch:
    return rollouts.select(torch.tensor([i for i in range(rollouts.num_sequences) if i != sequence]))


def compare(rank, world, parallel, where):
    """Metrics; parameters must be those of a step that never saw the faulty sequence, with NaN in the poison alone."""
    loss = ON_POLICY if where == "current pass" else None
    rollouts = make_rollouts()
    after = []
    for faulty in (True, False):
        step = make_step(parallel=parallel, loss=loss, on_fault="skip_sample", **ALONE)
        sequence, token = (FAULTY, 0) if where == "data" else only_in(rollouts)
        if where != "data":
            poison(step, token)
        poisoned = {name: p.isnan() for name, p in parameters(step).items()}
        if not faulty:
            metrics = step.step(others(rollouts, sequence)).metrics
        elif where == "data":
            generation = rollouts.generation_logprobs.clone()
            generation[int(rollouts.cu_seqlens[sequence]) + 4] = math.nan
            found = step.step(rollouts.with_columns(generation_logprobs=generation))
        else:
            found = step.step(rollouts)
        after.append(parameters(step))
        assert all(torch.equal(p.isnan(), poisoned[name]) for name, p in after[-1].items())
    assert not found.rollouts.sample_mask[sequence] and int(found.rollouts.sample_mask.sum()) == 11
    torch.testing.assert_close(*after, rtol=0, atol=2e-6, equal_nan=True)
    return found.metrics, metrics


@pytest.mark.parametrize("where", ["data", "previous pass", "current pass"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_sample_is_as_if_it_had_not_been_there(layout, where):
    world, parallel = LAYOUTS[layout]
    for found, expected in run_ranks(world, compare, parallel, where, timeout=90):
        assert found["faulty_samples"] == 1 and found["skipped_steps"] == 0 and found["skipped_updates"] == 0
        for name in ("loss", "grad_norm", "valid_tokens", "policy_support_excluded_tokens"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)
        assert expected["faulty_samples"] == 0


def skip_step(rank, world, parallel, where):
    rollouts = make_rollouts()
    step = make_step(parallel=parallel, loss=ON_POLICY, on_fault="skip_step", **{**ALONE, "minibatches": 3})
    before = parameters(step)
    poisoned = only_in(rollouts)
    if where == "gradient":
        if rank == world - 1:
            next(step.model.bare_chunks[0].parameters()).register_hook(lambda grad: grad * math.nan)
    else:
        poison(step, poisoned[1])
        before = parameters(step)
    result = step.step(rollouts)
    return (
        result.metrics,
        poisoned[0],
        all(torch.allclose(p, before[name], rtol=0, atol=0, equal_nan=True) for name, p in parameters(step).items()),
    )


@pytest.mark.parametrize("where", ["current pass", "gradient"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_step_updates_nothing_from_the_fault_on(layout, where):
    world, parallel = LAYOUTS[layout]
    for metrics, sequence, unchanged in run_ranks(world, skip_step, parallel, where, timeout=60):
        updates_before = 0 if where == "gradient" else sequence // 4  # in minibatches of four
        assert metrics["skipped_steps"] == 1
        assert metrics["skipped_updates"] == 3 - updates_before
        assert unchanged == (updates_before == 0)
        assert (metrics["faulty_samples"], metrics["faulty_gradients"]) == ((0, 1) if where == "gradient" else (1, 0))


def skip_gradients(rank, world):
    step = make_step(on_fault="skip_sample", **ALONE)
    handle = next(step.model.bare_chunks[0].parameters()).register_hook(lambda grad: grad * math.nan)
    first = step.step(make_rollouts()).metrics
    handle.remove()
    return first, step.step(make_rollouts()).metrics


def test_training_goes_on_after_a_gradient_that_was_skipped():
    ((first, second),) = run_ranks(1, skip_gradients, timeout=60)
    assert (first["faulty_gradients"], first["skipped_updates"], first["grad_norm"]) == (1, 1, 0)
    assert (second["faulty_gradients"], second["skipped_updates"]) == (0, 0) and second["grad_norm"] > 0


def all_faulty(rank, world):
    step = make_step(on_fault="skip_sample", **ALONE)
    rollouts = make_rollouts()
    before = parameters(step)
    bad = rollouts.with_columns(generation_logprobs=torch.full_like(rollouts.generation_logprobs, math.nan))
    metrics = step.step(bad).metrics
    return metrics, all(torch.equal(p, before[name]) for name, p in parameters(step).items())


def test_nothing_is_updated_where_every_sample_is_at_fault():
    ((metrics, unchanged),) = run_ranks(1, all_faulty, timeout=60)
    assert (metrics["faulty_samples"], metrics["skipped_updates"], unchanged) == (12, 1, True)


def message(rank, world, parallel):
    rollouts = make_rollouts()
    step = make_step(parallel=parallel, loss=ON_POLICY, **ALONE)
    sequence, token = only_in(rollouts)
    poison(step, token)
    with pytest.raises(LogprobFault) as caught:
        step.step(rollouts)
    fault = caught.value
    return rollouts.sample_ids[sequence], str(fault), fault.rollouts.sample_ids, fault.rollouts.curr_logprobs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_carries_its_samples_and_names_neighbours_and_rank(layout):
    world, parallel = LAYOUTS[layout]
    results = run_ranks(world, message, parallel, timeout=60)
    assert len({text for _, text, _, _ in results}) == 1
    for sample, text, carried, current in results:
        first = text.splitlines()[0]
        assert first.startswith(f"curr_logprobs of sample {sample!r}, token ") and "nan at the token after" in text
        assert "(rank " in first and carried == (sample,)
        assert bool(torch.isnan(current).any())


def advantages_beside_a_fault(rank, world):
    rollouts = make_rollouts()
    generation = rollouts.generation_logprobs.clone()
    generation[int(rollouts.cu_seqlens[FAULTY]) + 4] = math.nan
    found = make_step(on_fault="skip_sample").step(rollouts.with_columns(generation_logprobs=generation)).rollouts
    expected = make_step(on_fault="skip_sample").step(others(rollouts, FAULTY)).rollouts
    return others(found, FAULTY).advantages, expected.advantages


def test_a_sample_at_fault_is_not_in_its_groups_baseline():
    ((found, expected),) = run_ranks(1, advantages_beside_a_fault, timeout=60)
    assert torch.equal(found, expected) and bool(found.any())


def test_faults_of_a_minibatch_are_those_of_the_step():
    """The second of the sequences 5 and 7."""
    left_out = LeftOut("skip_sample", 12)
    rollouts = make_rollouts()
    left_out.take(FoundFaults(message="", sequences=torch.tensor([1]), rollouts=rollouts), torch.tensor([5, 7]))
    assert left_out.sequences.nonzero().flatten().tolist() == [7]
    left_out.take(FoundFaults(message="", sequences=torch.tensor([2]), rollouts=rollouts))
    assert left_out.mask(rollouts).sample_mask.logical_not().nonzero().flatten().tolist() == [2, 7]
