"""One actor step on the device, in Megatron-Core's local layers, is the one of a single process on the CPU."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from tests.gpu import bodies
from tests.gpu.setup import Machine

SAME = ("loss", "grad_norm", "kl_penalty", "probs_ratio", "policy_support_excluded_tokens")
LOCAL = {"transformer_impl": "local"}
WIDE = {"hidden_size": 256, "ffn_hidden_size": 512}
"""Heads of 64: what Transformer Engine's fused attention takes."""

LAYOUTS = {
    "one_rank": (1, {}),
    "fused_head": (1, {"logprobs": {"fused_head": True}}),
    "padded": (1, {"microbatch": {"max_tokens": 40, "layout": "padded"}}),
    "data_parallel": (2, {"optimizer": {"distributed": True}}),
    "tensor_parallel": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "context_parallel": (2, {"parallel": {"context": 2}}),
    "pipeline_parallel": (2, {"parallel": {"pipeline": 2}}),
    "tensor_and_data_parallel": (4, {"parallel": {"tensor": 2}}),
}


@pytest.fixture(scope="module")
def expected():
    return Machine("cpu", 1).run(1, bodies.actor_step, "cpu", LOCAL)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_local_layers_train_as_one_cpu_process_does(machine, expected, name):
    world, setup = LAYOUTS[name]
    if world > machine.ranks:
        pytest.skip(f"{world} ranks are needed and this machine has {machine.ranks}")
    for found in machine.run(world, bodies.actor_step, machine.kind, {**LOCAL, **setup}):
        assert found["device"] == machine.kind
        assert "transformer_engine" not in found["layers"]
        got = {key: found["metrics"][key] for key in SAME}
        assert got == pytest.approx({key: expected["metrics"][key] for key in SAME}, rel=1e-3, abs=1e-6)
        assert torch.equal(torch.isneginf(found["previous"]), torch.isneginf(expected["previous"]))
        torch.testing.assert_close(found["previous"], expected["previous"], rtol=1e-4, atol=1e-4)


def near(found: torch.Tensor, other: torch.Tensor) -> None:
    """Log-probabilities of two bf16 passes, or of one and an fp32 one: of random tokens, many of them -inf."""
    assert (torch.isfinite(found) == torch.isfinite(other)).double().mean() > 0.95
    both = torch.isfinite(found) & torch.isfinite(other)
    assert both.double().mean() > 0.5
    assert (found - other)[both].abs().mean() < 0.05


def test_bfloat16_is_near_float32(machine):
    (single,) = Machine("cpu", 1).run(1, bodies.actor_step, "cpu", LOCAL, steps=1)
    (found,) = machine.run(1, bodies.actor_step, machine.kind, {**LOCAL, "dtype": "bfloat16"}, steps=1)
    near(found["previous"], single["previous"])
    assert found["metrics"]["grad_norm"] == pytest.approx(single["metrics"]["grad_norm"], rel=0.2)
    assert math.isfinite(found["metrics"]["loss"])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_transformer_engine_layers_are_near_local_ones(machine, layout):
    if machine.kind == "cpu":
        pytest.skip("Transformer Engine needs a GPU")
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    setup = {"architecture": WIDE, "dtype": "bfloat16", "microbatch": {"max_tokens": 64, "layout": layout}}
    results = {}
    for name in ("local", "transformer_engine"):
        setup["transformer_impl"] = name
        (results[name],) = machine.run(1, bodies.actor_step, machine.kind, setup, steps=1)
    local, engine = results["local"], results["transformer_engine"]
    assert "transformer_engine" in engine["layers"]
    near(engine["previous"], local["previous"])
    assert engine["metrics"]["grad_norm"] == pytest.approx(local["metrics"]["grad_norm"], rel=0.2)


@pytest.mark.parametrize("package", ["transformer_engine", "apex"])
def test_a_fused_adam_updates_as_torch_does(machine, expected, package):
    """Megatron takes Transformer Engine's Adam, else Apex's; the second step has the first one's update in it."""
    if machine.kind == "cpu":
        pytest.skip("fused optimizers need a GPU")
    (found,) = machine.run(1, bodies.actor_step, machine.kind, LOCAL)
    if found["adam"] != package:
        pytest.skip(f"Megatron uses the Adam of {found['adam']} here")
    got = {key: found["metrics"][key] for key in SAME}
    assert got == pytest.approx({key: expected["metrics"][key] for key in SAME}, rel=1e-3, abs=1e-6)
