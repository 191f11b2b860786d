"""Megatron-LM through its own parser, get_args and train_step: gradients of its layouts are ours on one process."""

from __future__ import annotations

import pytest
import torch

from megatron_support.config.loss import ActorLossConfig
from megatron_support.loss import actor_loss
from megatron_support.support import support_logprobs
from megatron_support.types import SamplingParams
from tests.adapters import megatron_lm_setup as setup
from tests.megatron.tiny import shard_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(bool(setup.MISSING), reason=setup.MISSING)

TENSOR = ["--tensor-model-parallel-size", "2"]
LAYOUTS = {
    "one_rank": (1, []),
    "tp2": (2, TENSOR),
    "tp2_sequence": (2, [*TENSOR, "--sequence-parallel"]),
    "dp2": (2, []),
    "cp2": (2, ["--context-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
}
PER_TOKEN = "--calculate-per-token-loss"
LOSS = {
    "surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
    "kl": {"coef": 0.05, "type": "k3", "input_clamp": None, "output_clamp": None},
    "correction": {"type": "tis", "low": 0.0, "high": 3.0},
}


def _reference(rank, world, steps, loss, columns_of):
    """Gradients and metrics of one process that sees a whole step, without Megatron's schedule, DDP or scaling."""
    args, groups = setup.start(setup.flags())
    model, optimizer, scheduler, _ = setup.build(args)
    setup.set_weights(model, groups)
    optimizer.reload_model_params()
    bare = model[0].module
    found = []
    for number in range(steps):
        columns = columns_of(number)
        logits = bare(columns["tokens"], columns["position_ids"], None)
        values = support_logprobs(
            logits[:, :-1].contiguous(), columns["tokens"][:, 1:], SamplingParams(0.9, 60, 0.9), vocab_size=setup.VOCAB
        )
        output = actor_loss(
            ActorLossConfig.from_dict(loss),
            curr_logprobs=values.filtered,
            curr_logprobs_unfiltered=values.unfiltered,
            advantages=columns["advantages"][:, None].expand(values.filtered.shape),
            response_mask=columns["loss_mask"][:, 1:],
            prev_logprobs=columns["old_logprobs"],
            generation_logprobs=columns["inference_logprobs"],
            reference_logprobs=columns["ref_logprobs"],
        )
        names, parameters = zip(*setup.named(model), strict=True)
        for parameter in parameters:
            parameter.main_grad.zero_()
            parameter.grad_added_to_main_grad = True
        gradients = torch.autograd.grad(output.loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.main_grad.copy_(gradient)
        optimizer.step()
        scheduler.step(increment=setup.SEQUENCES)
        metrics = output.metrics.compute() | {"lm loss": float(output.loss)}
        found.append((dict(zip(names, gradients, strict=True)), metrics))
    return found


def _megatron(rank, world, steps, extra, columns_of):
    """The same through Megatron-LM's train_step."""
    from megatron_support.adapters.megatron_lm import forward_step

    args, groups = setup.start(setup.flags(*extra))
    model, optimizer, scheduler, config = setup.build(args)
    setup.set_weights(model, groups)
    optimizer.reload_model_params()
    found = []
    for number in range(steps):
        pieces = setup.microbatches(columns_of(number), groups)
        result, gradients = setup.train(model, optimizer, scheduler, config, forward_step, iter(pieces))
        found.append((gradients, {name: float(value) for name, value in result[0].items()}, result[1]))
    return found, groups.tensor_size, groups.tensor_rank


def _compare(results, expected):
    for found, tensor_size, tensor_rank in results:
        for (gradients, metrics, skipped), (whole, expected_metrics) in zip(found, expected, strict=True):
            assert not skipped
            assert gradients
            for name, gradient in gradients.items():
                want = shard_of(name, whole[name], tensor_size, tensor_rank)
                torch.testing.assert_close(gradient, want, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
            for name, value in metrics.items():
                assert value == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-5), name


@pytest.fixture(scope="module")
def expected():
    return run_ranks(1, _reference, 2, LOSS, setup.rollouts)[0]


@pytest.mark.parametrize("per_token", [False, True], ids=["divided_here", "per_token"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_two_train_steps_have_the_gradients_and_metrics_of_one_process(world, layout, per_token, expected):
    extra = [*layout, *([PER_TOKEN] if per_token else [])]
    _compare(run_ranks(world, _megatron, 2, extra, setup.rollouts), expected)
