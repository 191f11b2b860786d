"""The loss path in fp64, bf16 parameters with fp32 gradients, previous log-probabilities, and boundary tokens."""

from __future__ import annotations

import pytest
import torch

from megatron_support.config.recipe import ActorStepConfig, MicrobatchConfig, ModelConfig, ParallelConfig
from megatron_support.megatron.actor_step import LOSS_COLUMNS
from megatron_support.megatron.forward import compute_logprobs
from megatron_support.megatron.host import setup_host
from megatron_support.megatron.loss_function import MegatronActorLoss
from megatron_support.megatron.minibatch import prepare_minibatch
from megatron_support.megatron.model import build_model, wrap_ddp
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.megatron.schedule import run_schedule
from megatron_support.megatron.step_metrics import minibatch_outcome
from tests.megatron.actor_setup import MODEL, make_rollouts, make_step
from tests.megatron.matrix import LOSSES, PACKINGS, STILL, boundary_distance, loss_of, mixed_rollouts
from tests.megatron.tiny import parameter_gradients, shard_of
from tests.ranks import run_ranks

LAYOUTS = {
    "tp2": (2, {"tensor": 2}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "pp2_vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "dp3": (3, {}),
    "cp2_dp2": (4, {"context": 2}),
}


def _wide_gradients(rank, world, parallel, per_token, columns):
    """``{(loss, packing): (gradients, loss)}`` of the loss function in fp64, without optimizer."""
    setup_host("cpu")
    layout = ParallelConfig.from_dict(parallel)
    groups = initialize_parallel(layout)
    config = ModelConfig.from_dict(MODEL)
    bare = build_model(config, layout, groups, seed=7, dtype=torch.float64, calculate_per_token_loss=per_token)
    model = wrap_ddp(bare, grad_reduce_in_fp32=False)
    rollouts = mixed_rollouts().with_columns(**columns)
    results = {}
    for loss in LOSSES:
        for packing in PACKINGS:
            minibatch = prepare_minibatch(
                rollouts,
                microbatch=MicrobatchConfig(max_tokens=64, layout=packing),
                groups=groups,
                device=model.device,
                columns=LOSS_COLUMNS,
                virtual_pipeline=model.virtual_pipeline,
                sequence_parallel=layout.sequence,
            )
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
            step_config = ActorStepConfig.from_dict(
                {"loss": loss_of(loss, "rollout"), "microbatch": {"max_tokens": 64}, "logprobs": {"fused_head": False}}
            )
            function = MegatronActorLoss(
                step_config.loss, model=model, minibatch=minibatch, groups=groups, logprobs=step_config.logprobs
            )
            records = run_schedule(model, minibatch, function.forward_step, forward_only=False)
            outcome = minibatch_outcome(records, function, groups, model.device)
            results[loss, packing] = parameter_gradients(model), outcome.loss
    return results, groups.tensor_rank


def _columns(rank, world):
    """Data of the loss, the same for every layout: previous log-probabilities beside the model's own, references."""
    step = make_step()
    rollouts = mixed_rollouts()
    previous = compute_logprobs(step.model, rollouts, groups=step.groups, microbatch=step.config.microbatch)
    generator = torch.Generator().manual_seed(3)
    shift = 0.3 * torch.randn(rollouts.tokens.numel(), generator=generator)
    return {
        "prev_logprobs": previous.filtered + shift,
        "reference_logprobs": previous.unfiltered - shift,
        "advantages": torch.randn(rollouts.tokens.numel(), generator=generator),
    }


@pytest.fixture(scope="module")
def wide():
    columns = run_ranks(1, _columns)[0]
    return columns, run_ranks(1, _wide_gradients, {}, False, columns)[0][0]


@pytest.mark.parametrize(("name", "per_token"), [*((name, False) for name in LAYOUTS), ("cp2_dp2", True)])
def test_loss_and_gradients_in_fp64_are_those_of_one_process(wide, name, per_token):
    columns, expected = wide
    world, parallel = LAYOUTS[name]
    tensor = parallel.get("tensor", 1)
    for results, tensor_rank in run_ranks(world, _wide_gradients, parallel, per_token, columns):
        for (loss, packing), (gradients, value) in results.items():
            whole, whole_value = expected[loss, "packed"]
            assert value == pytest.approx(whole_value, rel=1e-10, abs=1e-12)
            for own_name, gradient in gradients.items():
                target = "embedding.word_embeddings.weight" if own_name == "output_layer.weight" else own_name
                part = shard_of(target, whole[target], tensor, tensor_rank)
                scale = float(whole[target].abs().max())
                torch.testing.assert_close(
                    gradient, part, rtol=0, atol=1e-10 * scale, msg=lambda m, n=target, p=packing: f"{n} {p}: {m}"
                )


def _unfiltered_gradients(rank, world, dtype, parallel, optimizer):
    step = make_step(parallel=parallel, optimizer=STILL | optimizer, dtype=dtype, minibatches=1)
    rollouts = make_rollouts().without_filters()  # bf16 may move a token over the border of its support
    step.step(rollouts)
    return parameter_gradients(step.model), step.groups.tensor_rank


@pytest.fixture(scope="module")
def narrow():
    """Gradients in one process with bf16 parameters, and how far those are from fp32's."""
    exact = run_ranks(1, _unfiltered_gradients, "float32", {}, {})[0][0]
    rounded = run_ranks(1, _unfiltered_gradients, "bfloat16", {}, {})[0][0]
    return rounded, {name: float((rounded[name] - exact[name]).abs().max()) for name in exact}


BF16_LAYOUTS = {
    "dp2_distributed": (2, {}, {"distributed": True}),
    "tp2_sp_cp2": (4, {"tensor": 2, "sequence": True, "context": 2}, {}),
    "pp2_vpp2_recompute": (2, {"pipeline": 2, "virtual_pipeline": 2, "recompute": {"type": "full"}}, {}),
}


@pytest.mark.parametrize("name", BF16_LAYOUTS)
def test_bf16_parameters_with_fp32_gradients_are_as_close_as_bf16_is(narrow, name):
    """Within twice bf16's own error of bf16 in one process."""
    expected, error = narrow
    world, parallel, optimizer = BF16_LAYOUTS[name]
    tensor = parallel.get("tensor", 1)
    for gradients, tensor_rank in run_ranks(world, _unfiltered_gradients, "bfloat16", parallel, optimizer):
        for own_name, gradient in gradients.items():
            target = "embedding.word_embeddings.weight" if own_name == "output_layer.weight" else own_name
            assert gradient.dtype == torch.float32
            part = shard_of(target, expected[target], tensor, tensor_rank)
            torch.testing.assert_close(
                gradient, part, rtol=0, atol=2 * error[target], msg=lambda m, n=target: f"{n}: {m}"
            )


def _at_the_border(step):
    """Sequences whose top-p is the very mass above one of their tokens: rounding alone decides about it."""
    rollouts = make_rollouts(groups=16, samples=2, seed=9)
    open_ended = rollouts.with_columns(
        top_k=torch.zeros_like(rollouts.top_k), top_p=torch.full_like(rollouts.top_p, 0.5)
    )
    gap = boundary_distance(step, open_ended)
    logprobs = compute_logprobs(step.model, open_ended, groups=step.groups, microbatch=MicrobatchConfig(max_tokens=64))
    fifth = rollouts.cu_seqlens[:-1] + 4
    outside = torch.isneginf(logprobs.filtered[fifth])
    mass = torch.where(outside, 0.5 + gap[fifth], 0.5 - gap[fifth])
    return open_ended.with_columns(top_p=mass.float().clamp(0.01, 0.99))


def _border_rollouts(rank, world):
    step = make_step()
    rollouts = _at_the_border(step)
    return rollouts, boundary_distance(step, rollouts)


def _previous(rank, world, parallel, rollouts, packing):
    step = make_step(parallel=parallel)
    microbatch = MicrobatchConfig(max_tokens=64, layout=packing)
    return compute_logprobs(step.model, rollouts, groups=step.groups, microbatch=microbatch)


@pytest.fixture(scope="module")
def border():
    """(rollouts, each token's distance from the border, log-probabilities in one process)."""
    rollouts, distance = run_ranks(1, _border_rollouts)[0]
    return rollouts, distance, run_ranks(1, _previous, {}, rollouts, "packed")[0]


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}], ids=["tp2", "cp2", "pp2"])
def test_only_tokens_at_the_border_may_change_sides(border, parallel, record_property):
    """Layouts reorder sums: a token may differ only where its distance lies within the log-probability difference."""
    rollouts, distance, expected = border
    for found in run_ranks(2, _previous, parallel, rollouts, "padded"):
        difference = float((found.unfiltered - expected.unfiltered).abs().max())
        assert difference < 1e-5
        border = distance <= max(difference, 1e-6)
        moved = torch.isneginf(found.filtered) != torch.isneginf(expected.filtered)
        record_property("boundary tokens, of which moved", f"{int(border.sum())}, {int(moved.sum())}")
        print(f"{int(border.sum())} boundary tokens, {int(moved.sum())} of them moved, at {distance[moved].tolist()}")
        assert border.sum() > 16, "the inputs are made to have them"
        assert not (moved & ~border).any(), distance[moved & ~border].tolist()


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (4, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
        (8, {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 2, "context": 2}),
        (8, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
    ],
    ids=["tp2_pp2_vpp2", "tp2_sp_pp2_vpp2_cp2", "tp2_pp2_vpp2_dp2"],
)
def test_previous_logprobs_keep_each_infinity_where_it_was(world, parallel):
    rollouts = mixed_rollouts()
    expected = run_ranks(1, _previous, {}, rollouts, "packed")[0]
    outside = torch.isneginf(expected.filtered)
    assert 3 < outside.sum() < rollouts.response_mask.sum() / 2
    for found in run_ranks(world, _previous, parallel, rollouts, "packed"):
        assert torch.equal(torch.isneginf(found.filtered), outside)
        torch.testing.assert_close(found.filtered[~outside], expected.filtered[~outside], rtol=0, atol=1e-5)
        torch.testing.assert_close(found.unfiltered, expected.unfiltered, rtol=0, atol=1e-5)
        assert found.unfiltered.isfinite().all()
