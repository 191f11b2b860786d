"""Megatron-LM through its own parser, get_args and train_step: gradients of its layouts are ours on one process."""

from __future__ import annotations

import sys

import pytest
import torch
import yaml

from megatron_support.config.loss import ActorLossConfig
from megatron_support.loss import actor_loss
from megatron_support.support import support_logprobs
from megatron_support.types import SamplingParams
from tests.adapters import megatron_lm_setup as setup
from tests.adapters import megatron_rl_standin as standin
from tests.megatron.tiny import shard_of
from tests.ranks import RanksFailed, run_ranks

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


def _reference(rank, world, steps, loss, columns_of, own_passes=False):
    """Gradients and metrics of one process that sees a whole step, without Megatron's schedule, DDP or scaling.

    ``own_passes`` takes old and reference log-probabilities from the same logits.
    """
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
            logits[:, :-1].contiguous(),
            columns["tokens"][:, 1:],
            SamplingParams(0.9, 60, 0.9),
            vocab_size=setup.VOCAB,
            entropy=True,
        )
        if own_passes:
            columns["old_logprobs"], columns["ref_logprobs"] = values.filtered.detach(), values.unfiltered.detach()
        output = actor_loss(
            ActorLossConfig.from_dict(loss),
            curr_logprobs=values.filtered,
            curr_logprobs_unfiltered=values.unfiltered,
            entropy=values.entropy,
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


GSPO = {
    "surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
    "ratio_level": "sequence",
    "aggregation": {"type": "sequence_mean"},
    "kl": {"coef": 0.05, "type": "k3"},
    "entropy_coef": 0.01,
}


@pytest.mark.parametrize("per_token", [False, True], ids=["divided_here", "per_token"])
@pytest.mark.parametrize("name", ["dp2", "cp2"])
def test_a_sequence_loss_of_the_settings_file_counts_sequences(name, per_token, tmp_path, monkeypatch):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({"loss": GSPO}))
    monkeypatch.setenv("MEGATRON_SUPPORT_CONFIG", str(path))
    world, layout = LAYOUTS[name]
    expected = run_ranks(1, _reference, 1, GSPO, setup.rollouts)[0]
    extra = [*layout, *([PER_TOKEN] if per_token else [])]
    _compare(run_ranks(world, _megatron, 1, extra, setup.rollouts), expected)


def _with_a_fault(step):
    columns = setup.rollouts(step)
    columns["old_logprobs"][1, 5] = torch.nan
    return columns


def test_a_fault_stops_the_run_before_the_optimizer_and_names_its_token():
    with pytest.raises(RanksFailed, match=r"LogprobFault: prev_logprobs at token 21 of sequence 1 is nan"):
        run_ranks(1, _megatron, 1, [PER_TOKEN], _with_a_fault)


def _outside(columns):
    """Which entries ``[b, S - 1]`` are about response tokens that are outside the old policy's support."""
    return torch.isneginf(columns["old_logprobs"]) & (columns["loss_mask"][:, 1:] != 0)


def _deleted(step):
    columns = setup.rollouts(step)
    columns["loss_mask"][:, 1:][_outside(columns)] = 0
    return columns


@pytest.mark.parametrize("per_token", [False, True], ids=["divided_here", "per_token"])
def test_an_excluded_token_leaves_the_gradients_of_the_others_as_if_deleted(per_token):
    """But for the denominator, which counts it: gradients are compared as sums."""
    extra = ["--grpo-kl-beta", "0", *([PER_TOKEN] if per_token else [])]
    ((excluded,), *_), ((deleted,), *_) = (
        run_ranks(1, _megatron, 1, extra, columns)[0] for columns in (setup.rollouts, _deleted)
    )
    count, fewer = (float((columns(0)["loss_mask"][:, 1:] != 0).sum()) for columns in (setup.rollouts, _deleted))
    assert count - fewer == float(_outside(setup.rollouts()).sum()) > 0
    assert any(gradient.abs().max() > 1e-3 for gradient in deleted[0].values())
    for name, gradient in excluded[0].items():
        torch.testing.assert_close(gradient * count, deleted[0][name] * fewer, rtol=2e-5, atol=2e-5)


def _packed(columns):
    """Two sequences to a bin, as Megatron-LM's packing context; and a bin without sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bins, width = setup.SEQUENCES // 2, 2 * setup.WIDTH

    def joined(values, fill=0):
        if values.shape[1] < setup.WIDTH:
            values = torch.nn.functional.pad(values, (0, 1), value=fill)
        return values.reshape(bins, width)

    wide = {name: joined(columns[name]) for name in ("tokens", "loss_mask", "position_ids", "inference_logprobs")}
    wide["inference_logprobs"] = wide["inference_logprobs"][:, :-1]
    bounds = torch.tensor([0, setup.WIDTH, width], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=setup.WIDTH,
        max_seqlen_kv=setup.WIDTH,
    )
    return {
        "columns": wide,
        "advantages": columns["advantages"].view(bins, 2),
        "starts": [[0, setup.WIDTH]] * bins,
        "lengths": [[setup.WIDTH] * 2] * bins,
        "indices": [[2 * i, 2 * i + 1] for i in range(bins)],
        "params": [params] * bins,
    }


def _train_rl(rank, world, extra, packed):
    """Registration, the two passes, and a train_step on what ``train_rl.py`` feeds its forward step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_support.adapters import megatron_lm, register

    rl = standin.installed(sys.modules)
    bins = {"seq-length": 2 * setup.WIDTH, "max-position-embeddings": 2 * setup.WIDTH, "micro-batch-size": 1}
    bins["global-batch-size"] = setup.SEQUENCES // 2
    shape = [word for name, value in bins.items() for word in (f"--{name}", str(value))] if packed else []
    args, groups = setup.start(setup.flags(*extra, *shape))
    model, optimizer, scheduler, config = setup.build(args)
    setup.set_weights(model, groups)
    register("megatron_lm")
    columns, context = setup.rollouts(), None
    if packed:
        context = _packed(columns)
        rl.get_rl_runtime_state().packing_context = context
    columns = context["columns"] if packed else columns
    run = get_forward_backward_func()
    columns["old_logprobs"], columns["ref_logprobs"] = rl.prepare_data_for_update(
        model[0], columns, context, args.micro_batch_size, run
    )
    if packed:
        share = len(columns["tokens"]) // groups.data_size
        entries = [(torch.tensor([share * groups.data_rank + i]),) for i in range(share)]
    else:
        entries = [
            tuple(piece[name] for name in megatron_lm.microbatch.COLUMNS)
            for piece in setup.microbatches(columns, groups)
        ]
    result, gradients = setup.train(model, optimizer, scheduler, config, megatron_lm.rl_forward_step, iter(entries))
    metrics = {name: float(value) for name, value in result[0].items()}
    inside = columns["loss_mask"][:, 1:] != 0
    passes = [columns[name][inside] for name in ("old_logprobs", "ref_logprobs")]
    return [(gradients, metrics, result[1])], groups.tensor_size, groups.tensor_rank, passes, rl.get_rl_runtime_state()


@pytest.mark.parametrize(
    ("world", "extra", "packed"),
    [
        (1, [], False),
        (1, [PER_TOKEN], True),
        (2, [], True),
        (2, [*TENSOR, PER_TOKEN], False),
        (2, ["--context-parallel-size", "2"], False),
        (2, ["--pipeline-model-parallel-size", "2"], False),
    ],
    ids=["rows", "bins", "bins_dp2", "rows_tp2", "rows_cp2", "rows_pp2"],
)
def test_train_rl_takes_its_old_log_probabilities_from_the_hooked_pass(world, extra, packed):
    expected = run_ranks(1, _reference, 1, LOSS, setup.rollouts, own_passes=True)[0]
    results = run_ranks(world, _train_rl, extra, packed)
    _compare([result[:3] for result in results], expected)
    for *_, (old, reference), state in results:
        assert torch.isneginf(old).any()
        assert torch.isfinite(reference).all()
        assert bool((old[~torch.isneginf(old)] >= reference[~torch.isneginf(old)] - 1e-5).all())  # less mass to share
        data_size = world if world > 1 and not extra else 1
        assert state.sequences == setup.SEQUENCES // data_size


def _unregistered(rank, world):
    from megatron_support.adapters import megatron_lm
    from megatron_support.errors import ConfigurationError

    standin.installed(sys.modules)
    args, _ = setup.start(setup.flags())
    model, *_ = setup.build(args)
    with pytest.raises(ConfigurationError, match="must be registered where rollouts are filtered"):
        megatron_lm.rl_forward_step(iter([()]), model[0])


def test_train_rl_without_registration_is_refused():
    run_ranks(1, _unregistered)
