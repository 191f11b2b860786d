"""The loss under torch.compile, as one graph, equals eager."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron_support.loss import actor_loss
from tests.loss_batch import INF, SURROGATES, TERMS, config, gradients, random_batch, with_gradients


def compiled_equals_eager(name: str, backend: str, device: str, wanted_metrics: str = "full") -> None:
    batch = {key: value.to(device) for key, value in random_batch(6).items()}
    batch["prev_logprobs"][0, 1] = -INF
    names = tuple(batch)
    chosen = config(name)

    def loss(*tensors):
        output = actor_loss(chosen, **dict(zip(names, tensors, strict=True)), metrics=wanted_metrics)
        return output.loss, dict(output.metrics)

    eager, compiled = with_gradients(batch), with_gradients(batch)
    expected, metrics = loss(*eager.values())
    torch._dynamo.reset()
    actual, compiled_metrics = torch.compile(loss, fullgraph=True, backend=backend)(*compiled.values())
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for key, value in gradients(expected, eager).items():
        torch.testing.assert_close(gradients(actual, compiled)[key], value, rtol=1e-12, atol=1e-12)
    wanted = {key: metric.compute() for key, metric in metrics.items()}
    assert {key: metric.compute() for key, metric in compiled_metrics.items()} == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("name", ["kl_on_policy", "icepop_sequence"])
def test_the_whole_loss_compiles_to_one_graph(name):
    """Traced and differentiated as one graph; the default code generator is tested below."""
    compiled_equals_eager(name, "aot_eager", "cpu")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_the_compiled_loss_equals_eager():
    compiled_equals_eager("ppo_clip", "inductor", "cpu", "minimal")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SURROGATES | TERMS)
def test_the_compiled_loss_equals_eager_on_a_gpu(name):
    compiled_equals_eager(name, "inductor", "cuda")
