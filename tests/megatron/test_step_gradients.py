"""Every parameter's gradient of one actor step, under any layout, is that of one process (fp32)."""

from dataclasses import replace

import pytest
import torch

from tests.megatron.actor_setup import KL_GSPO, make_rollouts, make_step
from tests.megatron.tiny import parameter_gradients, shard_of
from tests.ranks import run_ranks

LOSSES = {
    "token": {"kl": {"coef": 0.05, "type": "k2"}, "entropy_coef": 0.01, "correction": {"type": "tis", "high": 2.0}},
    "gspo_survivors": KL_GSPO | {"normalization": "survivors", "aggregation": {"type": "sequence_mean"}},
    "dr_grpo_on_policy_kl": {
        "aggregation": {"type": "dr_grpo", "max_length": 16},
        "kl": {"coef": 0.05, "on_policy": True},
        "correction": {"type": "icepop", "low": 0.2, "high": 5.0},
        "min_support_fraction": 0.3,
    },
}

LAYOUTS = {
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "tp2_sp_fused": (2, {"parallel": {"tensor": 2, "sequence": True}, "logprobs": {"fused_head": True}}),
    "pp2_vpp2": (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    "cp2_padded": (2, {"parallel": {"context": 2}, "microbatch": {"max_tokens": 48, "layout": "padded"}}),
    "dp2": (2, {}),
    "dp3_few_sequences": (3, {}),
    "tp2_cp2": (4, {"parallel": {"tensor": 2, "context": 2}}),
    "tp2_pp2_fused_padded": (
        4,
        {
            "parallel": {"tensor": 2, "pipeline": 2},
            "microbatch": {"max_tokens": 48, "layout": "padded"},
            "logprobs": {"fused_head": True},
        },
    ),
}


def _mixed_rollouts():
    """Filters and temperatures that differ, sequences without a filter, masked ones, an engine's own -inf."""
    rollouts = make_rollouts(groups=2, samples=4, seed=5)
    generator = torch.Generator().manual_seed(6)
    temperature = 0.7 + torch.rand(8, generator=generator)
    top_k = torch.tensor([70, 0, 40, 0, 90, 60, 0, 70])
    top_p = torch.tensor([0.9, 1.0, 1.0, 0.95, 0.9, 1.0, 1.0, 0.99])
    generation = rollouts.generation_logprobs.clone()
    generation[int(rollouts.cu_seqlens[4]) + 3] = -torch.inf
    generation[~rollouts.response_mask] = torch.nan  # never looked at
    sample_mask = torch.ones(8, dtype=torch.bool)
    sample_mask[3] = False
    return replace(
        rollouts,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generation_logprobs=generation,
        sample_mask=sample_mask,
    )


def _gradients(rank, world, setup):
    step = make_step(optimizer={"clip_grad": 0.0}, minibatches=1, **setup)
    result = step.step(_mixed_rollouts())
    metrics = {name: value for name, value in result.metrics.items() if not name.startswith("seconds/")}
    return parameter_gradients(step.model), metrics, step.groups.tensor_rank


@pytest.fixture(scope="module")
def one_process():
    return {name: run_ranks(1, _gradients, {"loss": loss})[0] for name, loss in LOSSES.items()}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_metrics_are_those_of_one_process(one_process, layout, loss):
    expected, metrics, _ = one_process[loss]
    assert metrics["policy_support_excluded_tokens"] > 3
    world, setup = LAYOUTS[layout]
    tensor = setup.get("parallel", {}).get("tensor", 1)
    seen = set()
    for gradients, other_metrics, tensor_rank in run_ranks(world, _gradients, setup | {"loss": LOSSES[loss]}):
        for own_name, gradient in gradients.items():
            # the last pipeline stage has a copy of the tied embedding, which gets the whole gradient too
            name = "embedding.word_embeddings.weight" if own_name == "output_layer.weight" else own_name
            whole = shard_of(name, expected[name], tensor, tensor_rank)
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(gradient, whole, rtol=0, atol=2e-6 * scale, msg=lambda m, n=name: f"{n}: {m}")
            seen.add(name)
        assert other_metrics == pytest.approx(metrics, rel=2e-5, abs=1e-6)
    assert seen == set(expected)
