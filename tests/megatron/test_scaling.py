"""The scaling contract against Megatron's own schedule, DDP and finalize_model_grads."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_support.config.recipe import ParallelConfig
from megatron_support.megatron.host import setup_host
from megatron_support.megatron.parallel import initialize_parallel
from megatron_support.megatron.scaling import loss_factor, survivor_rescale
from tests.ranks import run_ranks

MICROBATCHES = 3


class _Line(MegatronModule):
    """loss = w * x, so that the gradient of w is the sum of all x that reached the loss."""

    def __init__(self, config):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.ones(1))

    def set_input_tensor(self, tensor):
        pass

    def forward(self, x):
        return self.weight * x


def _run(parallel, per_token, returned, sums=None):
    """The gradient of w after Megatron's schedule; ``returned(loss, factor)`` is what the loss function gives back.

    Microbatch i of this rank has x = ``sums[i]``; by default the ranks count on: 1, 2, 3 | 4, 5, 6 | ...
    """
    setup_host("cpu")
    groups = initialize_parallel(ParallelConfig.from_dict(parallel))
    sums = sums or [float(1 + groups.world_rank * MICROBATCHES + i) for i in range(MICROBATCHES)]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        calculate_per_token_loss=per_token,
        context_parallel_size=groups.context_size,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), _Line(config))
    config.finalize_model_grads_func = finalize_model_grads
    factor = loss_factor(
        calculate_per_token_loss=per_token,
        num_microbatches=len(sums),
        data_parallel_size=groups.data_size,
        context_parallel_size=groups.context_size,
    )

    def forward_step(iterator, chunk):
        return chunk(next(iterator)), lambda output: returned(output.sum(), factor)

    values = [torch.tensor([value]) for value in sums]
    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(values),
        model=model,
        num_microbatches=len(sums),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return model, float(model.module.weight.main_grad), groups


def _two_tuple(rank, world, parallel, per_token):
    _, gradient, _ = _run(parallel, per_token, lambda loss, factor: (loss * factor, {}))
    return gradient


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, {}), (2, {}), (2, {"context": 2}), (4, {"context": 2})],
    ids=["1", "dp2", "cp2", "dp2cp2"],
)
def test_net_factor_is_one(world, parallel, per_token):
    total = sum(range(1, world * MICROBATCHES + 1))
    assert run_ranks(world, _two_tuple, parallel, per_token) == pytest.approx([total] * world, rel=1e-6)


def _survivors(rank, world, parallel, per_token, survivors):
    """Each microbatch holds ``survivors`` of 5 tokens; the loss is a sum."""

    def returned(loss, factor):
        return (loss.clone(), torch.tensor(survivors, dtype=torch.int), {}) if per_token else (loss * factor, {})

    model, _, groups = _run(parallel, per_token, returned)
    ranks_and_microbatches = groups.data_context_size * MICROBATCHES
    model.scale_gradients(
        survivor_rescale(
            survivors=survivors * ranks_and_microbatches,
            rollout_count=5 * ranks_and_microbatches,
            already_divided=per_token,
        )
    )
    return float(model.module.weight.main_grad)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("survivors", "divisor"), [(4, 4), (0, 5)])
@pytest.mark.parametrize(("world", "parallel"), [(2, {}), (2, {"context": 2})], ids=["dp2", "cp2"])
def test_survivors_divide_once_and_the_rollout_count_takes_over_where_none_is_left(
    world, parallel, survivors, divisor, per_token
):
    expected = sum(range(1, world * MICROBATCHES + 1)) / (divisor * world * MICROBATCHES)
    results = run_ranks(world, _survivors, parallel, per_token, survivors)
    assert results == pytest.approx([expected] * world, rel=1e-6)


def _divided(rank, world, parallel, per_token, ranks, count):
    """Sums of token losses over one global count; ``ranks[r]`` are the sums of rank r's microbatches."""
    _, gradient, _ = _run(parallel, per_token, lambda loss, factor: (loss / count * factor, {}), ranks[rank])
    return gradient


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("world", "parallel", "ranks"),
    [(1, {}, [[1.0, 9.0]]), (2, {}, [[1.0], [9.0]]), (2, {"context": 2}, [[1.0], [9.0]])],
    ids=["two_microbatches", "dp2", "cp2"],
)
def test_a_loss_of_1_over_one_token_and_9_over_three_is_2_5_with_and_without_the_flag(
    world, parallel, ranks, per_token
):
    """A mean of means would be (1 + 3) / 2 = 2; forgetting the divisor 10; dividing twice .625."""
    assert run_ranks(world, _divided, parallel, per_token, ranks, 4) == pytest.approx([2.5] * world, rel=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("world", "parallel", "ranks"),
    [
        (1, {}, [[1.0, 9.0, 4.0, 0.0]]),
        (2, {}, [[1.0, 9.0], [4.0, 0.0]]),
        (2, {"context": 2}, [[1.0, 3.0, 2.0], [0.0, 6.0, 2.0]]),
        (4, {"context": 2}, [[1.0, 6.0], [0.0, 3.0], [2.0, 0.0], [2.0, 0.0]]),
    ],
    ids=["one_rank", "dp2", "cp2", "dp2cp2"],
)
def test_token_losses_1_and_3_3_3_and_2_2_with_a_masked_sequence_are_14_over_6_for_every_split(
    world, parallel, ranks, per_token
):
    """Sequences {1}, {3, 3, 3}, {2, 2} and one that is all masked, whole or in pieces on context-parallel ranks."""
    assert run_ranks(world, _divided, parallel, per_token, ranks, 6) == pytest.approx([14 / 6] * world, rel=1e-6)


def _kept(rank, world, parallel, per_token, ranks, kept, survivors):
    """Rank r keeps ``kept[r]`` tokens; ``rollout`` divides by 5 at once, ``survivors`` by 4 once they are counted."""

    def returned(loss, factor):
        if not survivors:
            return loss / 5 * factor, {}
        return (loss.clone(), torch.tensor(kept[rank], dtype=torch.int), {}) if per_token else (loss * factor, {})

    model, _, _ = _run(parallel, per_token, returned, ranks[rank])
    if survivors:
        model.scale_gradients(survivor_rescale(survivors=4, rollout_count=5, already_divided=per_token))
    return float(model.module.weight.main_grad)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("survivors", "expected"), [(False, 6 / 5), (True, 6 / 4)])
@pytest.mark.parametrize("parallel", [{}, {"context": 2}], ids=["dp2", "cp2"])
def test_three_tokens_of_which_one_is_excluded_and_two_others(parallel, survivors, expected, per_token):
    """Rank 0 keeps losses 1 and 1 of three tokens, rank 1 has 2 and 2: 6 / 5 over the rollout, 6 / 4 over survivors."""
    results = run_ranks(2, _kept, parallel, per_token, [[2.0], [4.0]], [2, 2], survivors)
    assert results == pytest.approx([expected] * 2, rel=1e-6)
