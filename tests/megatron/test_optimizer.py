"""The schedule's numbers, weight decay's reach, one AdamW update, and the distributed optimizer's equality."""

import math

import pytest
import torch

from megatron_support.config.recipe import OptimizerSettings, ParallelConfig, RandomWeights, ScheduleConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.model import wrap_ddp
from megatron_support.megatron.optimizer import build_optimizer
from megatron_support.megatron.weights import load_weights
from tests.megatron.tiny import tiny_model
from tests.ranks import run_ranks


def _trainer(settings, total_steps=10, parallel=None, **options):
    model, groups = tiny_model(parallel or ParallelConfig(), **options)
    model = wrap_ddp(model, distributed_optimizer=settings.distributed)
    return model, groups, *build_optimizer(settings, model.chunks, total_steps)


def _settings(**changes):
    return OptimizerSettings(**({"lr": 0.1, "min_lr": 0.02, "weight_decay": 0.5, "clip_grad": 0.0} | changes))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"type": "constant"}, [0.1] * 6),
        # two warmup updates: a third, two thirds, then the full rate
        ({"type": "constant", "warmup_steps": 2}, [0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1, 0.1]),
        # from 0.1 to 0.02 over the run of four updates, and flat behind it
        ({"type": "linear"}, [0.1, 0.08, 0.06, 0.04, 0.02, 0.02]),
        ({"type": "linear", "decay_steps": 2}, [0.1, 0.06, 0.02, 0.02, 0.02, 0.02]),
        (
            {"type": "cosine", "warmup_steps": 1},
            [
                0.05,
                0.1,
                0.02 + 0.04 * (1 + math.cos(math.pi / 3)),
                0.02 + 0.04 * (1 + math.cos(2 * math.pi / 3)),
                0.02,
                0.02,
            ],
        ),
    ],
)
def test_learning_rate_of_each_update(schedule, expected):
    def on_rank(rank, world):
        *_, optimizer, scheduler = _trainer(_settings(schedule=ScheduleConfig(**schedule)), total_steps=4)
        rates = []
        for _ in expected:
            rates.append([group["lr"] for group in optimizer.param_groups])
            scheduler.step(1)
        assert all(len(set(groups)) == 1 for groups in rates)
        return [groups[0] for groups in rates]

    assert run_ranks(1, on_rank)[0] == pytest.approx(expected)


def test_weight_decay_leaves_out_biases_and_norms():
    def on_rank(rank, world):
        from tests.megatron.tiny import TINY

        architecture = TINY.model_copy(update={"qkv_bias": True, "qk_norm": True})
        model, _, optimizer, scheduler = _trainer(_settings(), architecture=architecture)
        scheduler.step(1)
        decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        return {name: decay[id(parameter)] for name, parameter in model.bare_chunks[0].named_parameters()}

    decays = run_ranks(1, on_rank)[0]
    for name, decay in decays.items():
        assert decay == (0.0 if name.endswith("bias") or "norm" in name else 0.5), name
    assert sum(decay == 0.0 for decay in decays.values()) == 4 * 5 + 1


def _steps(rank, world, settings, dtype, updates=3):
    """Parameters before and after updates with gradients that differ by element and by update."""
    model, _, optimizer, scheduler = _trainer(settings, dtype=dtype)
    chunk = model.bare_chunks[0]
    before = {name: p.detach().clone() for name, p in chunk.named_parameters()}
    for update in range(updates):
        for chunk_ in model.chunks:
            chunk_.zero_grad_buffer()
        optimizer.zero_grad()
        for _, parameter in chunk.named_parameters():
            parameter.main_grad.copy_(_gradient(parameter, update))
        for chunk_ in model.chunks:
            chunk_.finish_grad_sync()
        success, norm, _ = optimizer.step()
        assert success
        scheduler.step(1)
    return before, {name: p.detach().clone() for name, p in chunk.named_parameters()}, float(norm)


def _gradient(parameter, update):
    return torch.sin(torch.arange(parameter.numel()) + 3.0 * update).view(parameter.shape)


def test_updates_are_adamw_by_the_formula():
    """m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, p -= lr (wd p + (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps))."""
    ((before, after, _),) = run_ranks(1, _steps, _settings(eps=1e-3), "float32")
    for name in ("decoder.layers.1.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"):
        value, decay = before[name].double(), 0.0 if "norm" in name else 0.5
        m, v = torch.zeros_like(value), torch.zeros_like(value)
        for t in (1, 2, 3):
            g = _gradient(value, t - 1).double()
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            value = value - 0.1 * (decay * value + (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-3))
        torch.testing.assert_close(after[name], value.float(), rtol=0, atol=1e-6)


def test_clipping_scales_the_whole_gradient():
    """Adam's first update sees a common factor of the gradient only beside eps, so eps is large here."""
    ((_, free, norm),) = run_ranks(1, _steps, _settings(eps=1.0), "float32", 1)
    ((_, clipped, reported),) = run_ranks(1, _steps, _settings(eps=1.0, clip_grad=1.0), "float32", 1)
    assert reported == pytest.approx(norm) and norm > 10
    name = "decoder.final_layernorm.weight"  # no decay: p = 1 - lr g / (|g| + eps)
    gradient = _gradient(free[name], 0)
    torch.testing.assert_close(free[name], 1 - 0.1 * gradient / (gradient.abs() + 1), rtol=0, atol=1e-6)
    gradient = gradient / norm
    torch.testing.assert_close(clipped[name], 1 - 0.1 * gradient / (gradient.abs() + 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_distributed_optimizer_makes_the_same_updates(dtype):
    whole = run_ranks(2, _steps, _settings(eps=1e-3), dtype)
    shared = run_ranks(2, _steps, _settings(eps=1e-3, distributed=True), dtype)
    assert whole[0][1]["decoder.final_layernorm.weight"].dtype == getattr(torch, dtype)
    for name, value in whole[0][1].items():
        for result in (whole[1], *shared):
            torch.testing.assert_close(result[1][name], value, rtol=0, atol=1e-6 if dtype == "float32" else 0.0)


def test_bf16_keeps_small_updates_in_fp32_main_parameters():
    """100 updates of 1e-4 move a weight of 1 by 0.01, each of them far below bf16's spacing of 0.008 at 1."""
    settings = _settings(lr=1e-4, min_lr=0.0, eps=1e-8)

    def on_rank(rank, world):
        model, _, optimizer, _ = _trainer(settings, dtype="bfloat16")
        norm = model.bare_chunks[0].decoder.final_layernorm.weight
        for _ in range(100):
            optimizer.zero_grad()
            for parameter in model.bare_chunks[0].parameters():
                parameter.main_grad.fill_(1.0)
            optimizer.step()
        return norm.dtype, norm.float().mean().item()

    dtype, value = run_ranks(1, on_rank)[0]
    assert dtype == torch.bfloat16
    assert value == pytest.approx(0.99, abs=0.004)


def test_schedule_that_is_all_warmup_is_refused():
    def on_rank(rank, world):
        with pytest.raises(
            ConfigurationError, match=r"warmup_steps must be below the 4 steps of the linear decay, got 4"
        ):
            _trainer(_settings(schedule=ScheduleConfig(type="linear", warmup_steps=4)), total_steps=4)

    run_ranks(1, on_rank)


def test_wrapping_for_the_other_optimizer_is_refused():
    def on_rank(rank, world):
        model, _ = tiny_model()
        model = wrap_ddp(model, distributed_optimizer=False)
        with pytest.raises(ConfigurationError, match=r"pass the same value to wrap_ddp"):
            build_optimizer(_settings(distributed=True), model.chunks, 4)

    run_ranks(1, on_rank)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor=2),
        ParallelConfig(tensor=2, sequence=True),
        ParallelConfig(pipeline=2),
        ParallelConfig(context=2),
        ParallelConfig(),
    ],
    ids=["tp2", "tp2_sp", "pp2_tied", "cp2", "dp2"],
)
@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
def test_gradient_norm_counts_every_parameter_once(parallel, distributed):
    """With all gradients 1 the norm is the root of the number of parameters: shards add up, copies do not."""

    def on_rank(rank, world):
        model, _, optimizer, _ = _trainer(_settings(distributed=distributed), parallel=parallel)
        optimizer.zero_grad()
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.main_grad.fill_(1.0)
            chunk.finish_grad_sync()
        return float(optimizer.step()[1])

    # per layer: 32 x 32 query, 2 x 16 x 32 key and value, 32 x 32 output, 3 x 48 x 32 feed-forward, two norms; the
    # embedding of 100 rows padded to 128, tied; the final norm
    parameters = 4 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 48 * 32 + 2 * 32) + 128 * 32 + 32
    assert run_ranks(2, on_rank) == pytest.approx([parameters**0.5] * 2)


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
def test_weights_loaded_under_a_live_optimizer_survive_its_next_step(distributed):
    """The optimizer writes its fp32 main parameters back; ``reload_model_params`` makes them the loaded ones."""

    def on_rank(rank, world):
        settings = _settings(weight_decay=0.0, distributed=distributed)
        model, groups, optimizer, _ = _trainer(settings, dtype="bfloat16")
        load_weights(model, RandomWeights(), groups=groups, seed=77)
        optimizer.reload_model_params()
        loaded = [p.detach().clone() for p in model.bare_chunks[0].parameters()]
        optimizer.zero_grad()
        model.chunks[0].zero_grad_buffer()
        model.chunks[0].finish_grad_sync()
        assert optimizer.step()[0]
        after = list(model.bare_chunks[0].parameters())
        fresh = tiny_model(seed=77, dtype="bfloat16")[0].bare_chunks[0].parameters()
        return all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(loaded, after, fresh, strict=True))

    assert run_ranks(2, on_rank) == [True, True]
