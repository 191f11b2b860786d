"""Mixture of experts: one gradient whatever the layout, and auxiliary losses that keep Megatron's own scale."""

import pytest
import torch

from megatron_support.config.layout import smallest_world, validate_layout
from megatron_support.config.recipe import Architecture, ParallelConfig, Recipe
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.actor_step import ActorStep
from megatron_support.megatron.checkpoint import load_checkpoint, save_checkpoint
from megatron_support.megatron.forward import compute_logprobs
from tests.megatron.actor_setup import MODEL, make_rollouts, make_step
from tests.megatron.matrix import STILL, TOLERANCE, difference, loss_of, run_steps
from tests.megatron.tiny import parameter_gradients, tiny_model, tokens, whole_logits
from tests.ranks import run_ranks
from tests.unit.test_config import FILES, changed

MOE = {
    "num_experts": 4,
    "top_k": 2,
    "ffn_hidden_size": 24,
    "shared_expert_ffn_hidden_size": 32,
    "shared_expert_gate": True,
}
BALANCED = {"moe": MOE | {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}}

LAYOUTS = {
    "dp2": (2, {}),
    "ep2": (2, {"parallel": {"expert": 2}}),
    "ep2_distributed_overlap": (
        2,
        {
            "parallel": {"expert": 2},
            "optimizer": {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        },
    ),
    "ep2_over_cp2": (2, {"parallel": {"expert": 2, "context": 2}}),
    "ep2_over_tp2_sp": (2, {"parallel": {"expert": 2, "tensor": 2, "sequence": True}}),
    "tp2_sp_dp2": (4, {"parallel": {"tensor": 2, "sequence": True}}),
    "ep4_over_tp2_dp2": (4, {"parallel": {"expert": 4, "tensor": 2, "sequence": True}}),
    "ep2_pp2_full_recompute": (4, {"parallel": {"expert": 2, "pipeline": 2, "recompute": {"type": "full"}}}),
    "ep2_moe_recompute": (
        2,
        {"parallel": {"expert": 2, "recompute": {"type": "selective", "modules": ["moe", "shared_experts"]}}},
    ),
}
CONFIGS = {
    (loss, packing): {"loss": loss_of(loss, "survivors"), "microbatch": {"max_tokens": 64, "layout": packing}}
    for loss in ("token", "gspo")
    for packing in ("packed", "padded")
}


def _compare(rank, world, setup, expected):
    outcomes = run_steps(rank, world, setup, CONFIGS, architecture={"moe": MOE})
    tensor = setup.get("parallel", {}).get("tensor", 1)
    return {key: difference(outcome, expected[key], tensor=tensor) for key, outcome in outcomes.items()}


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(1, run_steps, {}, CONFIGS, architecture={"moe": MOE})[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_process(one_process, name):
    world, setup = LAYOUTS[name]
    ranks = run_ranks(world, _compare, setup, one_process)
    for key, expected in one_process.items():
        for found in (differences[key] for differences in ranks):
            assert found.worst <= TOLERANCE, f"{key}: gradient of {found.where} differs by {found.worst:.1e}"
            assert not found.support
            assert found.metrics == pytest.approx(expected.metrics, rel=2e-5, abs=1e-6), key
        assert set().union(*(differences[key].seen for differences in ranks)) == set(expected.gradients)


def _auxiliary_gradients(rank, world, sequences, budget, parallel, per_token):
    """Without rewards the actor's gradient is 0: what is left is that of the auxiliary losses."""
    step = make_step(
        architecture=BALANCED,
        parallel=parallel,
        per_token=per_token,
        optimizer=STILL,
        minibatches=1,
        loss={"surrogate": {"type": "reinforce"}},
        microbatch={"max_tokens": budget},
    )
    rollouts = make_rollouts(length=(16, 17)).select(torch.tensor(sequences))
    step.step(rollouts.with_columns(rewards=torch.zeros(len(sequences))))
    return parameter_gradients(step.model)


@pytest.fixture(scope="module")
def mean_of_single_microbatches():
    """Eight sequences of 16 tokens, two to a microbatch: the mean of the gradients of each microbatch by itself."""
    plan = [[i, i + 4] for i in range(4)]  # equal lengths are dealt in turn
    alone = [run_ranks(1, _auxiliary_gradients, members, 32, {}, False)[0] for members in plan]
    return {name: sum(g[name] for g in alone) / len(alone) for name in alone[0]}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {}), (2, {"expert": 2}), (2, {"pipeline": 2})])
def test_auxiliary_losses_are_a_mean_over_microbatches_and_data_ranks(
    mean_of_single_microbatches, world, parallel, per_token
):
    expected = mean_of_single_microbatches
    assert expected["decoder.layers.0.mlp.router.weight"].abs().max() > 1e-4
    for gradients in run_ranks(world, _auxiliary_gradients, list(range(8)), 32, parallel, per_token):
        for name, gradient in gradients.items():
            name = "embedding.word_embeddings.weight" if name == "output_layer.weight" else name
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=TOLERANCE * scale + 1e-12, msg=name)


def _actor_gradient(rank, world, architecture, per_token, loss):
    configs = {"only": {"loss": loss, "microbatch": {"max_tokens": 64}}}
    return run_steps(rank, world, {"per_token": per_token}, configs, architecture=architecture)["only"]


def test_the_flag_changes_neither_loss_nor_the_actors_gradient():
    """With auxiliary losses and the flag the loss goes another way through Megatron, as a sum over tokens."""
    loss = loss_of("token", "rollout")
    tiny = {"moe": MOE | {"aux_loss_coef": 1e-12}}
    plain = run_ranks(2, _actor_gradient, tiny, False, loss)
    for one, other in zip(plain, run_ranks(2, _actor_gradient, tiny, True, loss), strict=True):
        assert difference(one, other, tensor=1).worst <= TOLERANCE
        assert one.metrics == pytest.approx(other.metrics, rel=2e-5, abs=1e-6)


def test_survivors_are_refused_with_auxiliary_losses():
    def on_rank(rank, world):
        with pytest.raises(ConfigurationError, match=r"loss.normalization must be rollout .* got survivors"):
            make_step(architecture=BALANCED, loss={"normalization": "survivors"}, minibatches=1)
        make_step(architecture={"moe": MOE}, loss={"normalization": "survivors"}, minibatches=1)

    run_ranks(1, on_rank)


@pytest.mark.parametrize(
    ("changes", "parallel", "world", "message"),
    [
        ({}, {"expert": 3}, 3, r"parallel.expert must divide .*num_experts 4, got 3; use one of \[1, 2, 4\]"),
        ({}, {"expert": 4}, 2, r"parallel.expert must divide the 2 ranks of a pipeline stage, got 4; use one of"),
        ({}, {"tensor": 2}, 2, r"parallel.sequence must be true with parallel.tensor 2 and experts, got false"),
        ({"moe": None}, {"expert": 2}, 2, r"parallel.expert must be 1 for a dense model, got 2"),
        (
            {"moe": MOE | {"shared_expert_ffn_hidden_size": 31}},
            {"tensor": 2, "sequence": True},
            2,
            r"parallel.tensor must divide .*moe.shared_expert_ffn_hidden_size 31, got 2",
        ),
    ],
)
def test_impossible_layout(changes, parallel, world, message):
    architecture = Architecture.from_dict(MODEL["architecture"] | {"moe": MOE} | changes)
    with pytest.raises(ConfigurationError, match=message):
        validate_layout(architecture, ParallelConfig.from_dict(parallel), world)


def test_the_least_number_of_ranks_holds_every_expert():
    recipe = Recipe.from_dict(changed({"parallel": {"expert": 4, "tensor": 2, "pipeline": 2}, "rollouts": FILES}))
    assert smallest_world(recipe) == 8


def test_multi_token_prediction_is_refused():
    def on_rank(rank, world):
        with pytest.raises(ConfigurationError, match="mtp_num_layers must be null, got 1"):
            tiny_model(overrides={"mtp_num_layers": 1})

    run_ranks(1, on_rank)


def test_a_model_with_multi_token_prediction_that_another_program_built_is_refused():
    def on_rank(rank, world):
        step = make_step(minibatches=1)
        step.model.config.mtp_num_layers = 1
        with pytest.raises(ConfigurationError, match="mtp_num_layers must be null for an actor, got 1"):
            ActorStep(step.model, step.optimizer, None, step.config, groups=step.groups, reference=step.reference)
        with pytest.raises(ConfigurationError, match="mtp_num_layers must be null for an actor, got 1"):
            compute_logprobs(step.model, make_rollouts(), groups=step.groups, microbatch=step.config.microbatch)

    run_ranks(1, on_rank)


def _logits(rank, world, parallel, folder, save):
    """Saves fresh weights, or loads what was saved over another seed's."""
    architecture = Architecture.from_dict(MODEL["architecture"] | {"moe": MOE})
    model, groups = tiny_model(ParallelConfig.from_dict(parallel), architecture=architecture, seed=5 if save else 999)
    if save:
        save_checkpoint(folder, model)
    else:
        load_checkpoint(folder, model)
    return whole_logits(model, tokens(), groups, packed=True)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, {"expert": 2}), (1, {})), ((1, {}), (4, {"expert": 4, "tensor": 2, "sequence": True}))],
    ids=["ep2-to-one", "one-to-ep4-over-tp2"],
)
def test_a_checkpoint_goes_from_any_layout_to_any_other(tmp_path, saved, loaded):
    expected = run_ranks(saved[0], _logits, saved[1], tmp_path / "saved", True)[0]
    for logits in run_ranks(loaded[0], _logits, loaded[1], tmp_path / "saved", False):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
