"""The fault this plugin is for: a response with one token outside the policy support, under sequence ratios (GSPO).

Elsewhere its -inf becomes 0.0, probability one, and moves the ratio, the importance weight and the gradient of every
other token of the response.
"""

import math

import pytest
import torch

from megatron_support import ActorLossConfig, SamplingParams, actor_loss, support_logprobs

GSPO = ActorLossConfig.from_dict(
    {
        "surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "ratio_level": "sequence",
        "aggregation": {"type": "sequence_mean"},
    }
)


def _gspo(curr, prev, mask):
    curr = torch.tensor([curr], dtype=torch.float64, requires_grad=True)
    output = actor_loss(
        GSPO,
        curr_logprobs=curr,
        prev_logprobs=torch.tensor([prev], dtype=torch.float64),
        advantages=torch.ones_like(curr),
        response_mask=torch.tensor([mask]),
        filtered=True,
    )
    output.loss.backward()
    return output, curr.grad[0].tolist()


def test_by_hand():
    """Log-ratios .1, (excluded), -.3, 0: their mean is -.2/3, s = exp(-.2/3); the loss is -s, each gradient -s/3."""
    s = math.exp(-0.2 / 3)
    output, grad = _gspo([-0.9, -1.2, -2.3, -0.5], [-1.0, -math.inf, -2.0, -0.5], [1, 1, 1, 1])
    assert output.loss.item() == pytest.approx(-s, rel=1e-14)
    assert grad == pytest.approx([-s / 3, 0.0, -s / 3, -s / 3], rel=1e-14)
    assert grad[1] == 0.0
    assert output.metrics.compute()["policy_support_excluded_tokens"] == 1


def test_the_wrong_value_is_far_away():
    """With 0.0 in place of -inf the mean log-ratio is (-.2 - 1.2) / 4 and the loss -exp(-.35)."""
    output, _ = _gspo([-0.9, -1.2, -2.3, -0.5], [-1.0, 0.0, -2.0, -0.5], [1, 1, 1, 1])
    assert output.loss.item() == pytest.approx(-math.exp(-0.35), rel=1e-14)


@pytest.mark.parametrize("source", ["previous", "current", "both"])
def test_from_logits_excluding_is_deleting(source):
    """The gradient in the logits is that of the same batch with the token's response mask cleared."""
    generator = torch.Generator().manual_seed(3)
    sampling = SamplingParams(top_k=4, top_p=0.95)
    before = torch.randn(2, 5, 12, dtype=torch.float64, generator=generator)
    after = before + 0.05 * torch.randn(2, 5, 12, dtype=torch.float64, generator=generator)
    targets = before.argmax(-1)
    outside = (0, 2)  # second best on average, pushed out of the support below
    targets[outside] = before[outside].topk(2).indices[1]
    if source in ("previous", "both"):
        before[outside][targets[outside]] -= 50
    if source in ("current", "both"):
        after[outside][targets[outside]] -= 50
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]], dtype=torch.bool)
    previous = support_logprobs(before, targets, sampling).filtered

    def gradient(mask):
        logits = after.clone().requires_grad_(True)
        current = support_logprobs(logits, targets, sampling)
        output = actor_loss(
            GSPO,
            curr_logprobs=current.filtered,
            prev_logprobs=previous,
            advantages=torch.tensor([[1.0], [-0.5]], dtype=torch.float64).expand(2, 5),
            response_mask=mask,
        )
        output.loss.backward()
        return output, logits.grad

    output, grad = gradient(mask)
    deleted = mask.clone()
    deleted[outside] = False
    expected_output, expected = gradient(deleted)
    assert output.metrics.compute()["policy_support_excluded_tokens"] == 1
    assert output.loss.item() == expected_output.loss.item()
    torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-15)
    assert (grad[outside] == 0).all()
    assert (grad[0, 1] != 0).any(), "the others still learn"
