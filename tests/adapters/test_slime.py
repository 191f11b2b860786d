"""The slime adapter in a stand-in of slime's contract: Megatron's own schedule and DDP, slime's outer scaling."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_support import ActorLossConfig, actor_loss
from megatron_support.adapters import slime
from megatron_support.adapters.context import load_settings
from megatron_support.adapters.registry import register, unregister
from megatron_support.adapters.slime.options import loss_config
from megatron_support.config.recipe import ParallelConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError, LogprobFault
from megatron_support.megatron.host import setup_host
from megatron_support.megatron.parallel import initialize_parallel
from tests.adapters.slime_standin import (
    VOCAB,
    arguments,
    local,
    outer,
    packed,
    reducer,
    reference_logprobs,
    rollouts,
    take,
)
from tests.ranks import run_ranks

PADDED = 24
"""Rows of the vocabulary with its padding: a multiple of every tensor-parallel size."""

VARIANTS = {
    "top_k": {"rollout_top_k": 12, "rollout_temperature": 0.7},
    "replay": {"rollout_top_p": 0.9, "use_tis": True, "entropy_coef": 0.01},
    "gspo": {"rollout_top_k": 14, "advantage_estimator": "gspo", "eps_clip_high": 0.28},
    "cispo_kl": {
        "rollout_top_p": 0.9,
        "advantage_estimator": "cispo",
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
    },
    "engine_is_previous": {"rollout_top_k": 12, "use_rollout_logprobs": True, "eps_clip_c": 3.0},
}


def table() -> torch.Tensor:
    """Float64 ``[PADDED, VOCAB]``: the logits after each token."""
    return 2 * torch.randn(PADDED, VOCAB, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def replays(args) -> bool:
    return args.rollout_top_p != 1.0


def without_sets(batch, args):
    """slime has the recorded sets in a batch where top-p filters, and nowhere else."""
    return batch if replays(args) else {name: values for name, values in batch.items() if "top_p" not in name}


def expected(args, batch):
    """The gradient of the table by ``actor_loss`` on all rollouts in one process, divided by slime's counts."""
    weights = table().requires_grad_()
    found = reference_logprobs(weights, batch, args, replay=replays(args))
    previous = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    lengths = torch.tensor(batch["response_lengths"])
    loss = actor_loss(
        loss_config(args, load_settings()),
        curr_logprobs=found["filtered"],
        curr_logprobs_unfiltered=found["unfiltered"],
        entropy=found["entropy"],
        prev_logprobs=torch.cat(previous).double(),
        generation_logprobs=torch.cat(batch["rollout_log_probs"]).double(),
        reference_logprobs=torch.cat(batch["ref_log_probs"]).double(),
        advantages=torch.cat(batch["advantages"]).double(),
        response_mask=torch.cat(batch["loss_masks"]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        sample_mask=torch.ones(len(lengths), dtype=torch.bool),
        global_valid_tokens=sum(max(int(mask.sum()), 1) for mask in batch["loss_masks"]),
        global_valid_sequences=len(lengths),
    ).loss
    loss.backward()
    return float(loss.detach()), weights.grad


class Table(MegatronModule):
    """Logits looked up by token; tensor-parallel ranks hold columns."""

    def __init__(self, config, groups):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        whole = torch.nn.functional.pad(table(), (0, PADDED - VOCAB), value=-30.0).float()
        self.weight = torch.nn.Parameter(whole.chunk(groups.tensor_size, 1)[groups.tensor_rank].clone())
        self.weight.tensor_model_parallel = groups.tensor_size > 1

    def set_input_tensor(self, tensor):
        pass

    def forward(self, tokens):
        return torch.nn.functional.embedding(tokens, self.weight)


def train(rank, world, parallel, args):
    """One step of slime's stand-in through Megatron: (loss of the step, this rank's gradient of the table)."""
    setup_host("cpu")
    groups = initialize_parallel(ParallelConfig.from_dict(parallel))
    batch, microbatches = without_sets(rollouts(), args), 8 // 2 // groups.data_size
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=4,
        calculate_per_token_loss=args.calculate_per_token_loss,
        context_parallel_size=groups.context_size,
        tensor_model_parallel_size=groups.tensor_size,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Table(config, groups))
    config.finalize_model_grads_func = finalize_model_grads
    where = (groups.context_size, groups.context_rank)

    def forward_step(iterator, chunk):
        whole = next(iterator)

        def loss_function(logits):
            loss, logged = slime.policy_loss(
                args, local(whole, *where), logits, reducer(whole, args.calculate_per_token_loss, *where)
            )
            scaled, normaliser = outer(
                loss,
                whole,
                per_token=args.calculate_per_token_loss,
                microbatches=microbatches,
                batch_size=8,
                groups=groups,
            )
            return scaled, normaliser, {"loss": logged["loss"].clone()}

        return chunk(packed(whole, *where)), loss_function

    first = groups.data_rank * microbatches
    pieces = [take(batch, range(2 * i, 2 * i + 2)) for i in range(first, first + microbatches)]
    model.zero_grad_buffer()
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(pieces),
        model=model,
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return sum(float(entry["loss"]) for entry in reported), model.module.weight.main_grad.clone()


LAYOUTS = {"1": (1, {}), "dp2": (2, {}), "cp2": (2, {"context": 2}), "tp2": (2, {"tensor": 2})}


@pytest.mark.parametrize("per_token", [False, True], ids=["sample_mean", "per_token"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_net_gradient_is_that_of_one_process(variant, layout, per_token):
    args = arguments(**VARIANTS[variant], calculate_per_token_loss=per_token)
    loss, gradient = expected(args, rollouts())
    world, parallel = LAYOUTS[layout]
    ranks = run_ranks(world, train, parallel, args)
    tensor = parallel.get("tensor", 1)
    whole = torch.cat([found for _, found in ranks[:tensor]], 1)[:, :VOCAB].double()
    scale = float(gradient.abs().max())
    torch.testing.assert_close(whole, gradient, rtol=1e-4, atol=2e-6 * max(scale, 1e-3) + 1e-8)
    total = sum(value for value, _ in ranks[:: 2 if tensor == 2 else 1])
    count = sum(max(int(mask.sum()), 1) for mask in rollouts()["loss_masks"]) if per_token else 8
    assert total / count == pytest.approx(loss, rel=1e-4, abs=1e-6)


def one(args, batch, weights=None):
    """(loss, gradient of the table, what is logged) of one microbatch of all samples, before slime divides."""
    weights = (table() if weights is None else weights).float().requires_grad_()
    logits = torch.nn.functional.embedding(packed(batch, 1, 0), weights)
    loss, logged = slime.policy_loss(
        args, without_sets(batch, args), logits, reducer(batch, args.calculate_per_token_loss)
    )
    loss.backward()
    return loss.detach(), weights.grad, logged


@pytest.mark.parametrize("per_token", [False, True], ids=["sample_mean", "per_token"])
@pytest.mark.parametrize("variant", ["top_k", "replay", "gspo"])
def test_an_excluded_token_leaves_the_others_as_if_it_were_deleted(variant, per_token):
    args = arguments(
        **VARIANTS[variant],
        calculate_per_token_loss=per_token,
    )
    args.entropy_coef = 0.0
    excluded, deleted = rollouts(), rollouts()
    for batch in (excluded, deleted):
        batch["log_probs"][0][:] = -2.0
        batch["rollout_log_probs"][0][:] = -2.0
    excluded["log_probs"][0][1] = -torch.inf
    deleted["loss_masks"][0][1] = 0
    deleted["rollout_mask_sums"][0] = deleted["loss_masks"][0].sum()
    excluded["loss_masks"][0][1] = 1
    excluded["rollout_mask_sums"][0] = excluded["loss_masks"][0].sum()
    (loss, gradient, logged), (loss_without, gradient_without, _) = one(args, excluded), one(args, deleted)
    torch.testing.assert_close(loss, loss_without, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, gradient_without, rtol=1e-6, atol=1e-7)
    assert all(bool(torch.isfinite(value)) for value in logged.values())


def test_samples_that_share_a_rollout_share_its_denominator():
    """Two samples of one rollout, 1 divided by both their tokens; worked out from the per-token losses."""
    args = arguments(rollout_top_k=12)
    batch = take(rollouts(), range(4, 6))
    total = batch["loss_masks"][0].sum() + batch["loss_masks"][1].sum()
    shared = {**batch, "rollout_mask_sums": [total, total]}
    alone = [one(args, take(batch, range(i, i + 1)))[0] * batch["loss_masks"][i].sum() for i in range(2)]
    torch.testing.assert_close(one(args, shared)[0], sum(alone) / total, rtol=1e-5, atol=1e-7)


def test_a_microbatch_without_tokens_of_this_kind_keeps_its_graph():
    args = arguments(rollout_top_k=12)
    batch = take(rollouts(), range(3, 4))
    loss, gradient, logged = one(args, batch)
    assert float(loss) == 0.0
    assert not bool(gradient.any())
    assert float(logged["loss"]) == 0.0


@pytest.mark.parametrize("engine_is_previous", [False, True])
def test_the_logged_difference_is_between_trainer_and_engine(engine_is_previous):
    """slime's: the previous pass against the engine, or the current one where the engine's values are the previous."""
    args, batch = arguments(rollout_top_k=12, use_rollout_logprobs=engine_is_previous), rollouts()
    current = reference_logprobs(table(), batch, args, replay=False)["filtered"]
    engine, previous = torch.cat(batch["rollout_log_probs"]), torch.cat(batch["log_probs"])
    trainer = current if engine_is_previous else previous
    outside = torch.isneginf(engine) | torch.isneginf(current)
    outside |= torch.isneginf(engine if engine_is_previous else previous)
    wanted = reducer(batch, False)(torch.where(outside, 0.0, (trainer - engine).abs().double()))
    assert float(one(args, batch)[2]["train_rollout_logprob_abs_diff"]) == pytest.approx(float(wanted), rel=1e-5)


def test_a_nan_stops_by_name():
    batch = rollouts()
    batch["loss_masks"][0][0] = 1
    batch["log_probs"][0][0] = torch.nan
    with pytest.raises(LogprobFault, match="prev_logprobs at token 0 of sequence 0 is nan"):
        one(arguments(rollout_top_k=12), batch)


def test_without_a_filter_minus_infinity_is_a_fault():
    batch = rollouts()
    batch["loss_masks"][0][0] = 1
    batch["log_probs"][0][0] = -torch.inf
    with pytest.raises(LogprobFault, match="prev_logprobs at token 0 of sequence 0 is -inf"):
        one(arguments(), batch)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("variant", ["top_k", "replay"])
def test_the_pass_returns_the_log_probabilities_of_each_sample(variant, context, monkeypatch):
    """Every token of every context-parallel rank, put together; -inf where the token is outside the support."""
    args, batch = arguments(**VARIANTS[variant]), rollouts()
    found = reference_logprobs(table(), batch, args, replay=replays(args))
    assert bool(torch.isneginf(found["filtered"]).any()) is not replays(args)  # an engine samples from its own set
    for key, name in (("filtered", True), ("unfiltered", False)):
        wanted = {"log_probs": batch_of(found[key], batch), "entropy": batch_of(found["entropy"], batch)}
        for rank in range(context):
            from megatron_support.adapters.slime import logprobs

            monkeypatch.setattr(logprobs, "running_groups", lambda rank=rank: FakeContext(context, rank))
            _, result = slime.log_probs_and_entropy(
                torch.nn.functional.embedding(packed(batch, context, rank), table().float()),
                args=args,
                unconcat_tokens=batch["unconcat_tokens"],
                total_lengths=batch["total_lengths"],
                response_lengths=batch["response_lengths"],
                with_entropy=True,
                top_p_token_ids=batch["rollout_top_p_token_ids"] if replays(args) else None,
                top_p_token_offsets=batch["rollout_top_p_token_offsets"] if replays(args) else None,
                filtered=name,
            )
            assert result.keys() == {"log_probs", "entropy"}
            cut = local({**batch, "log_probs": wanted["log_probs"], "ref_log_probs": wanted["entropy"]}, context, rank)
            for ours, theirs in itertools.chain(
                zip(result["log_probs"], cut["log_probs"], strict=True),
                zip(result["entropy"], cut["ref_log_probs"], strict=True),
            ):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


class FakeContext(ParallelGroups):
    """One rank's place among context-parallel ranks, where nothing communicates."""

    def __init__(self, size, rank):
        super().__init__()
        object.__setattr__(self, "_place", (size, rank))

    context_size = property(lambda self: self._place[0])
    context_rank = property(lambda self: self._place[1])


def batch_of(values, batch):
    return list(values.split(batch["response_lengths"]))


def test_tis_gives_a_token_outside_the_support_no_loss_and_no_weight():
    args = arguments(use_tis=True, tis_clip=1.5, tis_clip_low=0.5)
    pg_loss = torch.tensor([1.0, torch.nan, 3.0, 4.0], requires_grad=True)
    train_log_probs = [torch.tensor([-1.0, -torch.inf]), torch.tensor([-1.0, -2.0])]
    engine = [torch.tensor([-1.2, -1.0]), torch.tensor([-torch.inf, -1.0])]
    masks = [torch.ones(2), torch.ones(2)]
    loss, same, metrics = slime.tis(
        args,
        pg_loss=pg_loss,
        train_log_probs=train_log_probs,
        rollout_log_probs=engine,
        loss_masks=masks,
        total_lengths=[4, 4],
        response_lengths=[2, 2],
    )
    # exp(-1 + 1.2) = 1.221403; exp(-2 + 1) = .367879, clipped to .5
    torch.testing.assert_close(loss.detach(), torch.tensor([1.221403, 0.0, 0.0, 4 * 0.5]), rtol=1e-5, atol=0)
    loss.sum().backward()
    torch.testing.assert_close(pg_loss.grad, torch.tensor([1.221403, 0.0, 0.0, 0.5]), rtol=1e-5, atol=0)
    assert same is masks
    assert metrics["tis_clipfrac"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert metrics["policy_support_excluded_share"].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert not any(value.requires_grad for value in metrics.values())


def advantage_data(**changes):
    data = {
        "rewards": [1.0, -0.5],
        "log_probs": [torch.tensor([-1.0, -torch.inf, -2.0]), torch.tensor([-0.5, -0.7])],
        "ref_log_probs": [torch.tensor([-1.1, -3.0, -1.5]), torch.tensor([-0.5, -1.0])],
        "values": [torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 0.4])],
        "loss_masks": [torch.ones(3), torch.ones(2)],
    }
    return {**data, **changes}


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_advantages_are_the_rewards(estimator):
    data = advantage_data()
    slime.advantages(arguments(advantage_estimator=estimator), data)
    assert [values.tolist() for values in data["advantages"]] == [[1.0] * 3, [-0.5] * 2]
    assert [values.tolist() for values in data["returns"]] == [[1.0] * 3, [-0.5] * 2]


def test_reinforce_plus_plus_has_no_kl_outside_the_support():
    """KL k1 .1 * [.1, 0 (outside), -.5]: returns to go of 1 - those."""
    data = advantage_data()
    slime.advantages(arguments(advantage_estimator="reinforce_plus_plus", kl_coef=0.1), data)
    torch.testing.assert_close(data["advantages"][0], torch.tensor([1 - 0.01 + 0.05, 1 + 0.05, 1 + 0.05]))
    torch.testing.assert_close(data["advantages"][1], torch.tensor([-0.5 - 0.03, -0.5 - 0.03]))


def test_the_reinforce_baseline_has_no_kl_outside_the_support():
    data = advantage_data()
    slime.advantages(arguments(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.1), data)
    torch.testing.assert_close(data["advantages"][0], torch.tensor([0.99, 1.0, 1.05]))


def test_gae_keeps_the_value_of_a_token_outside_the_support():
    """gamma = lambda = 1, so a return is what is still to come: reward minus KL."""
    data = advantage_data()
    slime.advantages(arguments(advantage_estimator="ppo", kl_coef=0.1), data)
    torch.testing.assert_close(data["returns"][0], torch.tensor([1.04, 1.05, 1.05]))
    torch.testing.assert_close(data["advantages"][0], torch.tensor([0.94, 0.85, 0.75]))


def test_estimators_along_a_sequence_refuse_context_parallelism(monkeypatch):
    from megatron_support.adapters.slime import estimators

    class Split(ParallelGroups):
        context_size = 2

    groups = Split()
    object.__setattr__(groups, "context", object())
    monkeypatch.setattr(estimators, "running_groups", lambda: groups)
    with pytest.raises(ConfigurationError, match=r"advantage_estimator 'ppo' follows whole sequences .* got 2"):
        slime.advantages(arguments(advantage_estimator="ppo"), advantage_data())


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"use_unbiased_kl": True}, {}, "use_unbiased_kl weights the KL term"),
        ({"calculate_per_token_loss": True}, {"aggregation": {"type": "sequence_mean"}}, "must divide by tokens"),
        ({}, {"aggregation": {"type": "token_mean"}}, "must divide by sequences with calculate_per_token_loss=False"),
        ({}, {"normalization": "survivors", "aggregation": {"type": "sequence_mean"}}, "must be 'rollout' in slime"),
        ({}, {"positive_nll_coef": 0.1, "aggregation": {"type": "sequence_mean"}}, "must be 0 in slime"),
    ],
)
def test_options_that_slime_cannot_carry_out_are_errors(changes, settings, message):
    from megatron_support.adapters.context import AdapterSettings

    chosen = AdapterSettings(loss=ActorLossConfig.from_dict(settings)) if settings else AdapterSettings()
    with pytest.raises(ConfigurationError, match=message):
        loss_config(arguments(**changes), chosen)


@pytest.fixture
def fake_slime(monkeypatch):
    """Modules of slime's names: an actor that looks ``forward_only`` up where slime's does."""
    names = ("slime", "slime.backends", "slime.backends.megatron_utils")
    modules = {name: ModuleType(name) for name in names}
    loss, actor = ModuleType(f"{names[-1]}.loss"), ModuleType(f"{names[-1]}.actor")
    loss.get_log_probs_and_entropy = lambda logits, **options: "theirs"
    loss.get_values = lambda logits, **options: "values"

    def forward_only(f, args, model, iterator, microbatches, store_prefix="", use_rollout_top_p_replay=False):
        return f, store_prefix, use_rollout_top_p_replay

    actor.forward_only = forward_only
    for module in (*modules.values(), loss, actor):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield actor, loss
    unregister("slime")


def test_the_pass_of_a_registered_process(fake_slime):
    actor, loss = fake_slime
    original = actor.forward_only
    args = arguments(rollout_top_p=0.9)
    args.custom_loss_function_path = slime.LOSS_PATH
    slime.init(args)
    report = register("slime")["slime"]
    assert report.hooked == ("log-probability pass",)
    assert report.originals == {"slime.backends.megatron_utils.actor.forward_only": original}

    def call(f, **options):
        return actor.forward_only(f, args, None, None, None, use_rollout_top_p_replay=True, **options)

    ours, prefix, replay = call(loss.get_log_probs_and_entropy)
    assert (ours.func, ours.keywords, prefix, replay) == (slime.log_probs_and_entropy, {"filtered": True}, "", True)
    for prefix in ("ref_", "teacher_"):
        ours, *rest = call(loss.get_log_probs_and_entropy, store_prefix=prefix)
        assert (ours.func, ours.keywords, rest) == (slime.log_probs_and_entropy, {"filtered": False}, [prefix, False])
    assert actor.forward_only(loss.get_values, args, None, None, None)[0] is loss.get_values
    args.custom_loss_function_path = None
    assert call(loss.get_log_probs_and_entropy) == (loss.get_log_probs_and_entropy, "", True)
    unregister("slime")
    assert actor.forward_only is original


def test_a_release_without_the_hooked_function_is_named(fake_slime):
    actor, _ = fake_slime
    del actor.forward_only
    with pytest.raises(ConfigurationError, match=r"actor\.forward_only does not exist in slime unknown"):
        register("slime")


def test_paths_resolve_as_slime_resolves_them():
    for name in ("policy_loss", "tis", "advantages", "init"):
        module, _, attribute = f"megatron_support.adapters.slime.{name}".rpartition(".")
        assert callable(getattr(sys.modules[module], attribute))
    assert slime.LOSS_PATH == "megatron_support.adapters.slime.policy_loss"
