"""The loss and the log-probabilities on the device are those of the CPU, and the loss never waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_support import ActorLossConfig, SamplingParams, actor_loss, support_logprobs
from tests.gpu.setup import no_synchronisation
from tests.loss_batch import SURROGATES, TERMS, config, random_batch

INF = float("inf")


def moved(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def test_three_packed_tokens_the_middle_one_excluded(device):
    """loss = -(A_a log p_a + A_c log p_c) / 2 with A_a = -1, A_c = 1; b is outside the support: [0.5, 0, -0.5]."""
    curr = torch.tensor([-1.0, -INF, -2.0], device=device, requires_grad=True)
    inputs = {
        "advantages": torch.tensor([-1.0, -1.0, 1.0]),
        "response_mask": torch.tensor([True, True, True]),
        "sequence_ids": torch.tensor([0, 0, 1]),
        "sample_mask": torch.tensor([True, True]),
    }
    reinforce = ActorLossConfig.from_dict({"surrogate": {"type": "reinforce"}, "normalization": "survivors"})
    output = actor_loss(reinforce, curr_logprobs=curr, **moved(inputs, device))
    output.loss.backward()
    assert curr.grad.tolist() == [0.5, 0.0, -0.5]
    assert output.loss.item() == 0.5 and output.loss.device.type == device.type
    assert (int(output.valid_tokens), int(output.surviving_tokens)) == (3, 2)


def test_from_packed_logits_the_excluded_token_has_no_gradient(device):
    """Four logits a token under top-k 2: the middle token's target is third, so its row of the gradient is 0.

    Row 0, filtered over its two largest (1, 0): A = -1, so d loss / d log p = 1/2, p = 1 / (1 + e).
    """
    logits = torch.tensor([[1.0, 0.0, -1.0, -2.0]] * 3, device=device, requires_grad=True)
    targets = torch.tensor([1, 2, 0], device=device)
    found = support_logprobs(logits, targets, SamplingParams(top_k=2))
    assert found.in_support.tolist() == [True, False, True] and found.filtered[1].item() == -INF
    reinforce = ActorLossConfig.from_dict({"surrogate": {"type": "reinforce"}, "normalization": "survivors"})
    output = actor_loss(
        reinforce,
        curr_logprobs=found.filtered,
        advantages=torch.tensor([-1.0, -1.0, 1.0], device=device),
        response_mask=torch.tensor([True, True, True], device=device),
        sequence_ids=torch.tensor([0, 0, 1], device=device),
        sample_mask=torch.tensor([True, True], device=device),
    )
    output.loss.backward()
    p = torch.tensor(1.0).sigmoid().item()  # of the larger logit; the other has 1 - p
    expected = torch.tensor([[-p / 2, p / 2, 0, 0], [0, 0, 0, 0], [-(1 - p) / 2, (1 - p) / 2, 0, 0]])
    torch.testing.assert_close(logits.grad.cpu(), expected, rtol=1e-5, atol=1e-7)
    assert not logits.grad[1].any()


@pytest.mark.parametrize("name", [*SURROGATES, *TERMS])
def test_loss_gradient_and_metrics_are_those_of_the_cpu(device, name):
    results = []
    for place in (torch.device("cpu"), device):
        batch = moved(random_batch(3), place)
        batch["prev_logprobs"][0, 2] = -INF
        batch["curr_logprobs"] = batch["curr_logprobs"].detach().requires_grad_()
        with no_synchronisation(place):
            output = actor_loss(config(name), **batch)
            output.loss.backward()
        results.append((output.loss.item(), batch["curr_logprobs"].grad.cpu(), output.metrics.compute()))
    (loss, gradient, metrics), (other, other_gradient, others) = results
    assert other == pytest.approx(loss, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-12, atol=1e-14)
    assert others == pytest.approx(metrics, rel=1e-10, abs=1e-12)
    assert (metrics["policy_support_excluded_tokens"] > 0) == (name != "on_policy"), "which reads no previous ones"
