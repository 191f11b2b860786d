"""The verl adapter in the installed package: its registry, its losses and ``agg_loss``, its worker loss, its engine.

Needs verl (scripts/test_hosts.sh installs it); skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_support.adapters.context import SETTINGS_VARIABLE
from megatron_support.adapters.registry import register, unregister
from megatron_support.adapters.verl import LOSS_MODE, policy_loss
from megatron_support.adapters.verl.engine import ENGINE
from megatron_support.adapters.verl.options import AGGREGATIONS
from megatron_support.config.recipe import ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.host import setup_host
from tests.adapters.verl_standin import LENGTH, counts, rows
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")

FILTER = "sampling: {top_k: 6}\n"
CORE = "verl.trainer.ppo.core_algos"


@pytest.fixture(scope="module")
def verl():
    """What the tests call of verl."""
    from verl.trainer.ppo import core_algos
    from verl.workers import engine_workers
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.engine.megatron import transformer_impl
    from verl.workers.utils import losses

    unregister("verl")  # where the package is installed, its entry point has registered on import
    return SimpleNamespace(
        core=core_algos,
        workers=engine_workers,
        losses=losses,
        engine=transformer_impl,
        ActorConfig=ActorConfig,
        PolicyLossConfig=PolicyLossConfig,
    )


@pytest.fixture
def registered(verl, monkeypatch):
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    yield register("verl")["verl"]
    unregister("verl")


@pytest.fixture
def filtered(monkeypatch, tmp_path):
    """Say in the settings file that rollouts are filtered."""

    def write() -> None:
        path = tmp_path / "settings.yaml"
        path.write_text(FILTER)
        monkeypatch.setenv(SETTINGS_VARIABLE, str(path))

    return write


def actor_config(verl, mode="token-mean", loss="vanilla", **changes):
    options = {"clip_ratio_high": 0.28, "loss_agg_mode": mode, "loss_scale_factor": LENGTH, **changes}
    chosen = verl.PolicyLossConfig(loss_mode=loss)
    return verl.ActorConfig(strategy="megatron", rollout_n=1, use_dynamic_bsz=True, policy_loss=chosen, **options)


def test_register_hooks_everything_and_unregister_restores_identity(verl, monkeypatch):
    engine, base = verl.engine.MegatronEngineWithLMHead, verl.engine.MegatronEngine

    def present():
        return (
            dict(verl.core.POLICY_LOSS_REGISTRY),
            verl.core.kl_penalty,
            verl.workers.ppo_loss,
            vars(engine)["_lm_head_logits_processor"],
            vars(base)["disable_adapter"],
        )

    before = present()
    first, second = register("verl")["verl"], register("verl")["verl"]
    assert first is second
    assert first.hooked == ("policy loss", "KL in rewards", "actor loss", "log-probability pass")
    assert first.version == importlib.metadata.version("verl")
    assert verl.core.get_policy_loss_fn(LOSS_MODE) is policy_loss
    assert first.originals[f"{CORE}.kl_penalty"] is before[1]
    assert first.originals["verl.workers.engine_workers.ppo_loss"] is before[2]
    assert first.originals[f"{ENGINE}.MegatronEngineWithLMHead._lm_head_logits_processor"] is before[3]
    assert all(new is not old for new, old in zip(present(), before, strict=True))
    unregister("verl")
    after = present()
    assert after[0] == before[0] and all(new is old for new, old in zip(after[1:], before[1:], strict=True))


def test_a_release_without_a_symbol_is_named_and_left_alone(verl, monkeypatch):
    monkeypatch.delattr(verl.engine.MegatronEngineWithLMHead, "_lm_head_logits_processor")
    before = dict(verl.core.POLICY_LOSS_REGISTRY), verl.workers.ppo_loss
    version = importlib.metadata.version("verl")
    with pytest.raises(ConfigurationError, match=f"_lm_head_logits_processor does not exist in verl {version}"):
        register("verl")
    assert (dict(verl.core.POLICY_LOSS_REGISTRY), verl.workers.ppo_loss) == before


def by_name(verl, name, batch, config, mode, **more):
    """(loss, gradient of the current log-probabilities) of a loss of verl's registry, called as its workers do."""
    current = batch["log_prob"].clone().requires_grad_()
    loss, metrics = verl.core.get_policy_loss_fn(name)(
        old_log_prob=batch["old_log_prob"],
        log_prob=current,
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=more.get("weights"),
    )
    loss.backward()
    return loss.detach(), current.grad, metrics


@pytest.mark.parametrize("world", [None, 1, 4])
@pytest.mark.parametrize("weights", [None, 0.7])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_loss_is_verls_own_where_nothing_is_excluded(mode, weights, world, verl, registered):
    """With local counts (None) and with the global counts of one and of four data-parallel ranks."""
    batch = rows(6)
    config = actor_config(verl, mode)
    if world is not None:
        info = {"batch_num_tokens": 100, "global_batch_size": 24, "dp_size": world, "loss_scale_factor": 12}
        config.global_batch_info.update(info)
    given = None if weights is None else torch.full_like(batch["log_prob"], weights)
    theirs = by_name(verl, "vanilla", batch, config, mode, weights=given)
    ours = by_name(verl, LOSS_MODE, batch, config, mode, weights=given)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-7, atol=1e-12)
    assert all(isinstance(value, float) for value in ours[2].values())


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_excluded_token_is_verls_own_loss_on_the_tokens_that_are_left(mode, verl, registered, filtered):
    filtered()
    batch = rows(6, excluding=True)
    config = actor_config(verl, mode)
    config.global_batch_info.update({**counts(batch), "dp_size": 2, "loss_scale_factor": 12})
    outside = torch.isneginf(batch["log_prob"]) | torch.isneginf(batch["old_log_prob"])
    left = {**batch, "response_mask": batch["response_mask"] & ~outside}
    for name in ("log_prob", "old_log_prob"):
        left[name] = torch.where(outside, -1.0, batch[name])
    assert int((batch["response_mask"] & outside).sum()) > 2
    ours, theirs = by_name(verl, LOSS_MODE, batch, config, mode), by_name(verl, "vanilla", left, config, mode)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-7, atol=1e-12)


def microbatch(batch, chosen, **info):
    """(data, model output, leaves) as verl's engine hands them to its loss: jagged, prompts of 2 tokens before each."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    lengths = [max(int(mask.nonzero().max()) + 1, 1) if mask.any() else 2 for mask in batch["response_mask"][chosen]]

    def jagged(values, dtype=None):
        return torch.nested.as_nested_tensor(
            [row[:length].to(dtype or row.dtype) for row, length in zip(values[chosen], lengths, strict=True)],
            layout=torch.jagged,
        )

    prompts = torch.nested.as_nested_tensor([torch.ones(2, dtype=torch.int64) for _ in lengths], layout=torch.jagged)
    data = TensorDict(
        {
            "prompts": prompts,
            "responses": jagged(torch.ones(len(batch["response_mask"]), LENGTH, dtype=torch.int64)),
            "response_mask": jagged(batch["response_mask"], torch.int64),
            "input_ids": torch.nested.as_nested_tensor(
                [torch.ones(2 + length, dtype=torch.int64) for length in lengths], layout=torch.jagged
            ),
            **{
                theirs: jagged(batch[ours])
                for theirs, ours in (("old_log_probs", "old_log_prob"), ("advantages", "advantages"))
            },
            "ref_log_prob": jagged(batch["reference"]),
        },
        batch_size=[len(lengths)],
    )
    tu.assign_non_tensor(data, **info)
    leaves, output = {}, {}
    for theirs, ours in (("log_probs", "log_prob"), ("log_probs_unfiltered", "unfiltered"), ("entropy", "entropy")):
        leaves[ours] = batch[ours][chosen].clone().requires_grad_()
        # A row of the model predicts the next token: a response of n tokens sits at rows 1 ... n of its 2 + n.
        pieces = [
            torch.cat([row.new_full((1,), -9.0), row[:length], row.new_full((1,), -9.0)])
            for row, length in zip(leaves[ours], lengths, strict=True)
        ]
        output[theirs] = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
    return data, output, leaves


def whole_rows(excluding):
    batch = rows(8, excluding=excluding)
    g = torch.Generator().manual_seed(11)
    finite = torch.where(torch.isneginf(batch["log_prob"]), -3.0, batch["log_prob"])
    batch["unfiltered"] = finite - 0.2 if excluding else finite
    batch["reference"] = finite + 0.3 * torch.randn(finite.shape, generator=g, dtype=torch.float64)
    batch["entropy"] = torch.rand(finite.shape, generator=g, dtype=torch.float64)
    return batch


def engine_step(verl, config, batch, loss_function):
    """(loss, gradients) of two data-parallel ranks of two microbatches through the engine's scaling and Megatron's."""
    engine = verl.engine.MegatronEngineWithLMHead.__new__(verl.engine.MegatronEngineWithLMHead)
    engine.engine_config = SimpleNamespace(dynamic_context_parallel=False)
    engine.tf_config = SimpleNamespace(calculate_per_token_loss=False)
    engine.get_data_parallel_group = lambda: None
    total, gradients = 0.0, {name: [] for name in ("log_prob", "unfiltered", "entropy")}
    for start in range(0, 8, 2):
        data, output, leaves = microbatch(batch, slice(start, start + 2), **counts(batch), dp_size=2, num_micro_batch=2)

        def loss_fn(model_output, data, dp_group=None):
            return loss_function(config=config, model_output=model_output, data=data, dp_group=dp_group)

        scaled, reported = engine.postprocess_micro_batch_func(output, data, forward_only=False, loss_function=loss_fn)
        (scaled / 2 / 2).backward()  # Megatron divides by the microbatches, DDP by the ranks
        total += float(reported["loss"]) / 2
        for name, leaf in leaves.items():
            gradients[name].append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return total, {name: torch.cat(found) for name, found in gradients.items()}, reported["metrics"]


TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "entropy_coeff": 0.05}


@pytest.mark.parametrize("use_kl_loss", [False, True])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_worker_loss_is_verls_own_where_nothing_is_filtered(mode, use_kl_loss, verl, registered):
    """Policy, KL and entropy terms through the engine's own scaling, against its own ``ppo_loss``.

    The KL term has verl's value, not its gradient: ours is that of the KL divergence (loss/README.md), verl's is that
    of the estimator.
    """
    batch, terms = whole_rows(False), {**TERMS, "use_kl_loss": use_kl_loss}
    theirs = engine_step(verl, actor_config(verl, mode, **terms), batch, verl.losses.ppo_loss)
    ours = engine_step(verl, actor_config(verl, mode, LOSS_MODE, **terms), batch, verl.workers.ppo_loss)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    for name in ("entropy",) if use_kl_loss else ("log_prob", "entropy"):
        torch.testing.assert_close(ours[1][name], theirs[1][name], rtol=1e-6, atol=1e-12)
    assert ours[2]["actor/pg_loss"].aggregation.value == "sum"


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_worker_loss_is_that_of_one_process_where_tokens_are_excluded(mode, verl, registered, filtered):
    from megatron_support import ActorLossConfig, actor_loss

    filtered()
    batch = whole_rows(True)
    config = actor_config(verl, mode, LOSS_MODE, **TERMS)
    loss, gradients, _ = engine_step(verl, config, batch, verl.workers.ppo_loss)
    aggregation = {"type": AGGREGATIONS[mode]}
    if mode == "seq-mean-token-sum-norm":
        aggregation["max_length"] = LENGTH
    leaves = {name: batch[name].clone().requires_grad_() for name in gradients}
    wanted = actor_loss(
        ActorLossConfig.from_dict(
            {
                "surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
                "aggregation": aggregation,
                "kl": {"coef": 0.1, "type": "k3"},
                "entropy_coef": 0.05,
            }
        ),
        curr_logprobs=leaves["log_prob"],
        curr_logprobs_unfiltered=leaves["unfiltered"],
        entropy=leaves["entropy"],
        prev_logprobs=batch["old_log_prob"],
        reference_logprobs=batch["reference"],
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
    ).loss
    wanted.backward()
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-6)
    for name, leaf in leaves.items():
        torch.testing.assert_close(gradients[name], leaf.grad, rtol=1e-6, atol=1e-12)


def test_another_loss_of_verl_stays_its_own(verl, registered):
    batch = whole_rows(False)
    theirs = engine_step(verl, actor_config(verl, **TERMS), batch, verl.losses.ppo_loss)
    ours = engine_step(verl, actor_config(verl, **TERMS), batch, verl.workers.ppo_loss)
    assert ours[0] == theirs[0]
    assert ours[2].keys() == theirs[2].keys()


def test_an_engine_that_does_not_filter_is_an_error(verl, registered, filtered):
    filtered()
    config = actor_config(verl, loss=LOSS_MODE)
    data, output, _ = microbatch(whole_rows(False), slice(0, 2), dp_size=1, batch_num_tokens=9, global_batch_size=2)
    del output["log_probs_unfiltered"]
    with pytest.raises(ConfigurationError, match="needs an engine that filters its log-probabilities"):
        verl.workers.ppo_loss(config=config, model_output=output, data=data)


def head(rank, world, path):
    """Outputs of the hooked head, as this rank sees them: training, reference engine, without adapter, and verl's."""
    from megatron_support.megatron.parallel import initialize_parallel

    os.environ[SETTINGS_VARIABLE] = path
    setup_host("cpu")
    groups = initialize_parallel(ParallelConfig.from_dict({"tensor": world}))
    from verl.workers.engine.megatron import transformer_impl

    original = vars(transformer_impl.MegatronEngineWithLMHead)["_lm_head_logits_processor"]
    whole = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(9)[None]
    weights = torch.linspace(-1, 1, 9)

    def engine(forward_only):
        made = transformer_impl.MegatronEngineWithLMHead.__new__(transformer_impl.MegatronEngineWithLMHead)
        made.engine_config = SimpleNamespace(forward_only=forward_only, entropy_from_logits_with_chunking=False)
        made.model_config = SimpleNamespace(hf_config=SimpleNamespace(vocab_size=32))
        made.module = None
        return made

    def call(function, made):
        leaf = whole.chunk(world, -1)[rank].clone().requires_grad_()
        found = function(
            made,
            leaf.clone(),
            labels,
            torch.full((1, 9), 0.8),
            calculate_sum_pi_squared=False,
            calculate_entropy=True,
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=None,
            batch=None,
            data_format="thd",
        )
        finite = torch.where(torch.isneginf(found["log_probs"]), 0.0, found["log_probs"])
        (finite * weights).sum().backward()
        return {name: value.detach() for name, value in found.items()} | {"gradient": leaf.grad}

    theirs = call(original, engine(False))
    register("verl")
    hooked = transformer_impl.MegatronEngineWithLMHead._lm_head_logits_processor
    actor = engine(False)

    class Adapter:
        @staticmethod
        def disable_adapter(module):
            import contextlib

            return contextlib.nullcontext()

    actor.peft_cls = Adapter
    with actor.disable_adapter():
        bare = call(hooked, actor)
    result = theirs, call(hooked, actor), call(hooked, engine(True)), bare
    assert groups.tensor_size == world
    return result


@pytest.mark.parametrize("world", [1, 2])
def test_the_engines_head_filters_the_actor_and_leaves_references_alone(world, verl, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(FILTER)
    ranks = run_ranks(world, head, str(path))
    logits = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0)).double()[0].requires_grad_()
    scaled = logits / 0.8
    keep = scaled >= scaled.topk(6, -1).values[:, -1:]
    labels = torch.arange(9)[:, None]
    norm = scaled.masked_fill(~keep, -torch.inf).logsumexp(-1)
    wanted = torch.where(keep.gather(1, labels)[:, 0], scaled.gather(1, labels)[:, 0] - norm, -torch.inf)
    torch.where(torch.isneginf(wanted), 0.0, wanted).mul(torch.linspace(-1, 1, 9)).sum().backward()
    assert 0 < int(torch.isneginf(wanted).sum()) < 9
    for theirs, ours, reference, bare in ranks:
        torch.testing.assert_close(ours["log_probs"][0].double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours["log_probs_unfiltered"], theirs["log_probs"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours["entropy"], theirs["entropy"], rtol=1e-5, atol=1e-5)
        for name in ("log_probs", "entropy", "gradient"):
            assert torch.equal(reference[name], theirs[name])
            assert torch.equal(bare[name], theirs[name])
    gradient = torch.cat([ours["gradient"] for _, ours, _, _ in ranks], -1)[0]
    torch.testing.assert_close(gradient.double(), logits.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_kl_in_rewards_is_zero_outside_the_support(kind, verl, registered, filtered):
    original = registered.originals[f"{CORE}.kl_penalty"]
    old = torch.tensor([[-1.0, -torch.inf, -2.0]])
    reference = torch.tensor([[-1.5, -1.0, -1.0]])
    finite = torch.tensor([[-1.0, -1.0, -2.0]])
    assert not torch.isfinite(original(old, reference, "abs")).all()
    filtered()
    found = verl.core.kl_penalty(old, reference, kind)
    torch.testing.assert_close(found, original(finite, reference, kind))
    assert float(found[0, 1]) == 0.0


def test_importing_verl_registers_in_a_process_of_its_own():
    code = (
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn as get; import verl.workers.engine_workers as w;"
        "print(get('policy_support').__module__, w.ppo_loss.__module__, w.ppo_loss.__wrapped__.__module__)"
    )
    environment = {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": "megatron_support.autoload",
        "MEGATRON_SUPPORT_HOSTS": "verl",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-3:] == [
        "megatron_support.adapters.verl.loss",
        "verl.workers.utils.losses",
        "verl.workers.utils.losses",
    ]
