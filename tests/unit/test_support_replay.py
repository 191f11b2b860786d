"""Replayed supports: renormalised over the sampler's own sets, with faults in the data named."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_support import RolloutSupport, SamplingParams, support_logprobs
from megatron_support.errors import RolloutError
from megatron_support.support import check_support, compare_supports, packed_names
from tests.support_reference import reference


def csr(sets: list[list[int]]) -> RolloutSupport:
    lengths = torch.tensor([0] + [len(s) for s in sets])
    return RolloutSupport(torch.tensor([i for s in sets for i in s], dtype=torch.int64), lengths.cumsum(0))


def masked_way(logits, targets, sets, temperature, weights):
    """Float64 filtered and unfiltered log-probabilities, entropy and gradient of their weighted sum."""
    leaf = logits.detach().double().requires_grad_()
    x = leaf / temperature
    mask = torch.ones(x.shape, dtype=torch.bool)
    for row, ids in enumerate(sets):
        if ids:
            mask[row] = False
            mask[row, ids] = True
    at = targets[:, None]
    log_p = torch.log_softmax(x, -1)
    outputs = (
        torch.log_softmax(x.masked_fill(~mask, -math.inf), -1).gather(1, at).squeeze(1),
        log_p.gather(1, at).squeeze(1),
        -(log_p.exp() * log_p).sum(-1),
    )
    loss = sum((output * weight.double()).sum() for output, weight in zip(outputs, weights, strict=True))
    return outputs, torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.05])
@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (1.0, 2.0, 3.0)])
def test_renormalises_over_the_given_ids(weights, temperature):
    torch.manual_seed(0)
    logits = (torch.randn(5, 300) * 3).requires_grad_()
    sets = [[7], [3, 9, 100], [], list(range(0, 300, 2)), [299, 0]]
    targets = torch.tensor([7, 9, 50, 44, 0])
    per_token = torch.randn(3, 5) * torch.tensor(weights)[:, None]
    found = support_logprobs(logits, targets, SamplingParams(temperature, 3, 0.1), support=csr(sets), entropy=True)
    outputs, want = masked_way(logits, targets, sets, temperature, per_token)
    for mine, theirs in zip((found.filtered, found.unfiltered, found.entropy), outputs, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=3e-6)
    assert found.in_support.all() and found.filtered[0] == 0
    loss = (found.filtered * per_token[0]).sum()
    if weights[1]:
        loss = loss + (found.unfiltered * per_token[1]).sum() + (found.entropy * per_token[2]).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=3e-6 / temperature)


def test_the_gradient_is_zero_outside_the_set():
    logits = torch.randn(2, 50, requires_grad=True)
    found = support_logprobs(logits, torch.tensor([3, 9]), SamplingParams(), support=csr([[3, 4], [9, 20, 21]]))
    found.filtered.sum().backward()
    assert logits.grad.nonzero().tolist() == [[0, 3], [0, 4], [1, 9], [1, 20], [1, 21]]


def test_a_set_far_below_the_maximum_keeps_its_digits():
    """Set logits 2000 below the row's maximum: exp of that is 0 even in float64; log softmax over [0, 1] is not."""
    logits = torch.full((1, 10), 0.0)
    logits[0, 4], logits[0, 5], logits[0, 9] = -2000.0, -1999.0, 0.0
    found = support_logprobs(logits, torch.tensor([4]), SamplingParams(), support=csr([[4, 5]]))
    assert found.filtered.item() == pytest.approx(-math.log(1 + math.e), abs=1e-6)


@pytest.mark.parametrize("top", [(20, 1.0), (None, 0.8), (30, 0.8)])
def test_replaying_the_recomputed_support_changes_nothing(top):
    torch.manual_seed(1)
    logits = torch.randn(6, 200) * 2
    kept = reference(logits, torch.zeros(6, dtype=torch.int64), top_k=top[0], top_p=top[1]).kept
    sets = [row.nonzero().flatten().tolist() for row in kept]
    targets = torch.tensor([s[len(s) // 2] for s in sets])
    sampling = SamplingParams(1.0, *top)
    recomputed = support_logprobs(logits, targets, sampling)
    replayed = support_logprobs(logits, targets, sampling, support=csr(sets))
    torch.testing.assert_close(replayed.filtered, recomputed.filtered, rtol=0, atol=1e-6)
    metrics = compare_supports(logits, targets, sampling, csr(sets)).compute()
    size = kept.sum().item() / 6
    assert metrics["support_jaccard"] == 1 and metrics["replayed_support_size"] == pytest.approx(size)
    assert metrics["recomputed_support_size"] == pytest.approx(size)
    assert abs(metrics["replayed_mass_outside"]) < 1e-6 and abs(metrics["recomputed_mass_outside"]) < 1e-6


def test_comparison_worked_out_by_hand():
    """Logits log [4, 3, 2, 1] with top-k 2: R = {0, 1}. S = {0, 2}: |R & S| = 1, |R | S| = 3; of S's mass 4 + 2 the
    trainer holds 4, of R's 4 + 3 the sampler holds 4. The second token has no set and does not count."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log().expand(2, 4)
    metrics = compare_supports(logits, torch.tensor([0, 1]), SamplingParams(1.0, 2), csr([[0, 2], []])).compute()
    want = {
        "support_jaccard": 1 / 3,
        "replayed_support_size": 2,
        "recomputed_support_size": 2,
        "replayed_mass_outside": 1 / 3,
        "recomputed_mass_outside": 3 / 7,
    }
    assert metrics == pytest.approx(want, abs=1e-6)


def test_padded_and_packed_batches_agree_and_sets_without_a_target_are_ignored():
    torch.manual_seed(2)
    logits = torch.randn(2, 3, 40)
    targets = torch.tensor([[5, 6, -1], [7, -1, -1]])
    sets = [[5, 1], [6, 2, 3], [999], [7, 8], [], [0, 0]]
    padded = support_logprobs(logits, targets, SamplingParams(), support=csr(sets))
    flat = [0, 1, 3]
    packed = support_logprobs(
        logits.view(6, 40)[flat], targets.view(6)[flat], SamplingParams(), support=csr([sets[i] for i in flat])
    )
    assert torch.equal(padded.filtered.view(6)[flat], packed.filtered)
    assert padded.filtered.view(6)[[2, 4, 5]].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (csr([[5], [6]]), "3 offsets for 4 tokens"),
        (RolloutSupport(torch.tensor([5, 6]), torch.tensor([0, 1, 2, 2, 3])), "from 0 to the number of token ids, 2"),
        (RolloutSupport(torch.tensor([5, 6]), torch.tensor([0, 2, 1, 2, 2])), "sample 0, token 1.*offsets descend"),
        (csr([[5], [6], [7, 40], [8]]), "sample 1, token 0 .target 7.*outside the vocabulary of 40"),
        (csr([[5], [6], [-1, 7], [8]]), "sample 1, token 0 .*outside the vocabulary"),
        (csr([[5], [6], [7], [3, 9]]), "sample 1, token 1 .target 8.*not in its own set"),
        (csr([[5], [6, 2, 6], [7], [8]]), "sample 0, token 1 .*given twice"),
    ],
)
def test_faults_name_sample_and_token(support, message):
    targets = torch.tensor([[5, 6], [7, 8]])
    with pytest.raises(RolloutError, match=message):
        support_logprobs(torch.zeros(2, 2, 40), targets, SamplingParams(), support=support)


def test_comparing_with_no_filter_is_an_error():
    with pytest.raises(ValueError, match="filter nothing"):
        compare_supports(torch.zeros(1, 4), torch.tensor([0]), SamplingParams(), csr([[0]]))


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (csr([[5], [6], [7], [3, 9]]), "the sampled token is not in its own set"),
        (RolloutSupport(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2, 4, 3])), "offsets descend"),
        (csr([[5], [6], [7], [8, 40]]), "a token id is outside the vocabulary of 40"),
    ],
)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        (None, "token 3"),
        (packed_names(torch.tensor([0, 1, 4])), "sample 1, token 2"),
        (packed_names(torch.tensor([0, 3, 4]), ["a", "b"]), "sample 'b', token 0"),
    ],
)
def test_a_fault_among_flat_tokens_is_named_by_its_place(name, place, support, message):
    """By sample and token where the caller says where samples begin, else by the index of the flat token."""
    with pytest.raises(RolloutError) as caught:
        check_support(support, torch.tensor([5, 6, 7, 8]), 40, name=name)
    assert str(caught.value).startswith(f"replayed support of {place} (target 8): {message}")


def test_flat_targets_are_checked_where_they_are_used():
    with pytest.raises(RolloutError, match=r"^replayed support of token 3 .target 8.: the sampled token"):
        support_logprobs(
            torch.zeros(4, 40), torch.tensor([5, 6, 7, 8]), SamplingParams(), support=csr([[5], [6], [7], [3]])
        )
