"""One model, whatever the layout: weights, logits and gradients of every layout are those of one process."""

import pytest
import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from megatron_support.config.recipe import ParallelConfig
from megatron_support.megatron.model import wrap_ddp
from megatron_support.megatron.weights.sharding import global_name
from tests.megatron.tiny import (
    TINY,
    last_stage,
    parameter_gradients,
    run_pipeline,
    shard_of,
    tiny_model,
    token_batch,
    tokens,
    whole_logits,
)
from tests.ranks import run_ranks

LAYOUTS = {
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2_sp": (2, ParallelConfig(tensor=2, sequence=True)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "pp2_vpp2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "cp2": (2, ParallelConfig(context=2)),
    "dp2": (2, ParallelConfig()),
    "tp2_sp_cp2": (4, ParallelConfig(tensor=2, sequence=True, context=2)),
}


def _weights(rank, world, parallel):
    model, _ = tiny_model(parallel)
    return {global_name(c, n): p.detach().clone() for c in model.bare_chunks for n, p in c.named_parameters()}


def _logits(rank, world, parallel, packed, architecture=TINY):
    model, groups = tiny_model(parallel, compute_dtype=torch.float64, architecture=architecture)
    return whole_logits(model, tokens(), groups, packed=packed)


def _gradients(rank, world, parallel, packed, overrides=None):
    """Of the squared log-sum-exp, a function that mixes the vocabulary, averaged over the tokens of four microbatches.

    The microbatches differ, so that a schedule that mixes them up is seen.
    """
    model, groups = tiny_model(parallel, compute_dtype=torch.float64, overrides=overrides)
    model = wrap_ddp(model, grad_reduce_in_fp32=False)
    batches = [token_batch(tokens(seed=seed), packed=packed, groups=groups) for seed in range(4)]
    count = sum(batch.input_ids.numel() for batch in batches) * groups.context_size

    def loss(logits):
        # every data-parallel rank has all tokens, and DDP averages over data- and context-parallel ranks; the schedule
        # multiplies by the context-parallel size
        total = reduce_from_tensor_model_parallel_region(logits.exp().sum(-1))
        return total.log().square().sum() / count

    run_pipeline(model, batches, groups, loss=loss)
    return parameter_gradients(model)


@pytest.fixture(scope="module")
def single():
    return {
        "weights": run_ranks(1, _weights, ParallelConfig())[0],
        "logits": run_ranks(1, _logits, ParallelConfig(), True)[0],
        "gradients": {packed: run_ranks(1, _gradients, ParallelConfig(), packed)[0] for packed in (True, False)},
    }


@pytest.mark.parametrize("layout", ["tp2", "pp2", "pp2_vpp2"])
def test_random_weights_do_not_depend_on_the_layout(single, layout):
    world, parallel = LAYOUTS[layout]
    seen = set()
    for rank, weights in enumerate(run_ranks(world, _weights, parallel)):
        for name, value in weights.items():
            whole = single["weights"]["embedding.word_embeddings.weight" if name == "output_layer.weight" else name]
            torch.testing.assert_close(
                value, shard_of(name, whole, parallel.tensor, rank % parallel.tensor), rtol=0, atol=0
            )
            seen.add(name)
    assert seen - {"output_layer.weight"} == set(single["weights"])


def test_another_seed_gives_other_weights(single):
    def other(rank, world):
        model, _ = tiny_model(seed=6)
        return model.bare_chunks[0].embedding.word_embeddings.weight.detach()

    assert not torch.equal(run_ranks(1, other)[0], single["weights"]["embedding.word_embeddings.weight"])


def test_random_weights_have_the_stated_spread(single):
    weights = single["weights"]
    embedding = weights["embedding.word_embeddings.weight"]
    assert embedding[100:].abs().max() == 0  # rows beyond the vocabulary
    assert embedding[:100].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["decoder.layers.0.mlp.linear_fc2.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.06)
    assert bool((weights["decoder.final_layernorm.weight"] == 1).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_logits_of_every_layout_are_those_of_one_process(single, layout, packed):
    world, parallel = LAYOUTS[layout]
    logits = last_stage(run_ranks(world, _logits, parallel, packed))
    torch.testing.assert_close(logits, single["logits"], rtol=0, atol=1e-12)


def test_untied_output_layer_is_its_own_weight_on_the_last_stage():
    untied = TINY.model_copy(update={"tie_embeddings": False})
    alone = run_ranks(1, _logits, ParallelConfig(), True, untied)[0]
    split = last_stage(run_ranks(2, _logits, ParallelConfig(pipeline=2), True, untied))
    tied = run_ranks(1, _logits, ParallelConfig(), True)[0]
    torch.testing.assert_close(split, alone, rtol=0, atol=1e-12)
    assert (alone - tied).abs().max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_layout_are_those_of_one_process(single, layout):
    _compare_gradients(single["gradients"][True], *LAYOUTS[layout], packed=True)


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2_vpp2", "cp2"])
def test_gradients_of_a_padded_batch(single, layout):
    _compare_gradients(single["gradients"][False], *LAYOUTS[layout], packed=False)


def test_recomputation_changes_no_gradient(single):
    overrides = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    _compare_gradients(single["gradients"][True], 1, ParallelConfig(), packed=True, overrides=overrides)


def _compare_gradients(expected, world, parallel, *, packed, overrides=None):
    seen = set()
    for rank, gradients in enumerate(run_ranks(world, _gradients, parallel, packed, overrides)):
        for name, value in gradients.items():
            whole = expected["embedding.word_embeddings.weight" if name == "output_layer.weight" else name]
            torch.testing.assert_close(
                value, shard_of(name, whole, parallel.tensor, rank % parallel.tensor), rtol=0, atol=1e-10, msg=name
            )
            seen.add(name)
    assert seen - {"output_layer.weight"} == set(expected)
