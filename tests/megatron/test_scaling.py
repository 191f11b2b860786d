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


def _run(parallel, per_token, returned):
    """The gradient of w after Megatron's schedule; ``returned(loss, factor)`` is what the loss function gives back."""
    setup_host("cpu")
    groups = initialize_parallel(ParallelConfig.from_dict(parallel))
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
        num_microbatches=MICROBATCHES,
        data_parallel_size=groups.data_size,
        context_parallel_size=groups.context_size,
    )

    def forward_step(iterator, chunk):
        return chunk(next(iterator)), lambda output: returned(output.sum(), factor)

    values = [torch.tensor([float(1 + groups.world_rank * MICROBATCHES + i)]) for i in range(MICROBATCHES)]
    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(values),
        model=model,
        num_microbatches=MICROBATCHES,
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
