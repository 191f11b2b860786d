"""support_logprobs on one rank: against a naive float64 sort, and the laws that it keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_support import SamplingParams, support_logprobs
from tests.support_reference import gradient, reference

MASS_ROUNDING = 2e-6
"""Relative error of a float32 mass over a vocabulary; membership may differ only where a boundary is that near."""

KINDS = ("peaked", "broad", "flat", "ties", "two_values", "constant", "one_hot", "holes", "staircase")


def make_row(kind: str, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(vocabulary, generator=generator)
    if kind == "peaked":
        return noise * 8
    if kind == "broad":
        return noise * 3
    if kind == "flat":
        return noise * 0.1
    if kind == "ties":
        return (noise * 2).round()
    if kind == "two_values":
        return (noise > 0.3).float()
    if kind == "constant":
        return torch.full((vocabulary,), 2.5)
    if kind == "one_hot":
        return torch.where(torch.arange(vocabulary) == int(vocabulary * 0.7), 60.0, 0.0)
    if kind == "holes":
        return torch.where((noise > -0.5) | (torch.arange(vocabulary) == 0), noise * 2, -math.inf)
    return -torch.arange(vocabulary).float() * 0.01


def probes(kept: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    """``[T, 4]`` targets: the largest logit, the smallest kept, the largest dropped, and an arbitrary one."""
    dropped = scaled.masked_fill(kept, -math.inf).argmax(-1)
    smallest = scaled.masked_fill(~kept, math.inf).argmin(-1)
    return torch.stack([scaled.argmax(-1), smallest, dropped, torch.full_like(dropped, scaled.shape[1] // 3)], 1)


def compare(rows: torch.Tensor, sampling: SamplingParams, ties: str, chunk_size: int | None = None) -> None:
    """Every output and gradient of four probing targets per row, against the reference."""
    settings_ = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "ties": ties}
    first = reference(rows, torch.zeros(len(rows), dtype=torch.int64), **settings_)
    targets = probes(first.kept, first.scaled.detach()).flatten()
    logits = rows.repeat_interleave(4, 0).requires_grad_()
    if isinstance(sampling.top_p, torch.Tensor):
        sampling = SamplingParams(
            *(f.repeat_interleave(4) for f in (sampling.temperature, sampling.top_k, sampling.top_p))
        )
        settings_.update(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    expected = reference(logits, targets, **settings_)
    found = support_logprobs(logits, targets, sampling, entropy=True, ties=ties, chunk_size=chunk_size)
    inside = expected.kept.gather(1, targets[:, None]).squeeze(1)
    gap = expected.boundary_gap.gather(1, targets[:, None]).squeeze(1)
    wrong = inside != found.in_support
    assert not (wrong & (gap > MASS_ROUNDING)).any(), f"membership differs at {wrong.nonzero().flatten().tolist()}"
    torch.testing.assert_close(found.unfiltered.double(), expected.unfiltered, rtol=3e-7, atol=3e-6)
    torch.testing.assert_close(found.entropy.double(), expected.entropy, rtol=1e-6, atol=1e-5)
    clear = (expected.boundary_gap > MASS_ROUNDING).all(1)
    both = inside & found.in_support & clear
    torch.testing.assert_close(found.filtered.double()[both], expected.filtered[both], rtol=3e-7, atol=3e-6)
    assert (found.filtered[~found.in_support] == -math.inf).all()
    _compare_gradients(logits, targets, sampling, expected, found, clear)


def _compare_gradients(logits, targets, sampling, expected, found, clear) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(3, len(targets), generator=generator)
    # -inf logits of a target have no gradient to compare
    clear = clear & (expected.unfiltered > -math.inf)
    kinds = ((1.0, 0.0, 0.0), (1.0, 1.0, 1.0)) if sampling.filters else ((0.0, 1.0, 1.0),)
    for on in kinds:
        f, u, h = (weight * factor * clear for weight, factor in zip(weights, on, strict=True))
        loss = (torch.where(found.in_support & clear, found.filtered, 0.0) * f).sum()
        if on[1]:
            loss = loss + (torch.where(clear, found.unfiltered, 0.0) * u).sum() + (found.entropy * h).sum()
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        want = gradient(expected, targets, sampling.temperature, (f, u, h))
        want = torch.where(clear[:, None], want, 0.0)
        low = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(logits.dtype, 0.0)
        # terms of this size cancel in float32
        scale = (f.abs() + u.abs() + h.abs() * (1 + expected.entropy.abs())) / torch.as_tensor(sampling.temperature)
        smallest = 2**-24 if logits.dtype == torch.float16 else 0.0
        error = (grad.double() - want).abs() - low * want.abs() - smallest
        assert (error <= 3e-6 * scale[:, None]).all(), float((error / scale[:, None].clamp(min=1e-6)).max())


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    vocabulary=st.sampled_from([2, 7, 33, 128, 129, 500, 2999]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    temperature=st.sampled_from([1.0, 0.7, 0.05, 20.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 50, 130, 2000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6, 0.999, math.nextafter(1.0, 0.0)]),
    ties=st.sampled_from(["group", "index"]),
    seed=st.integers(0, 2**31),
)
def test_agrees_with_a_float64_sort(kinds, vocabulary, dtype, temperature, top_k, top_p, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack([make_row(kind, vocabulary, generator) for kind in kinds]).to(dtype)
    compare(rows, SamplingParams(temperature, top_k, top_p), ties)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    vocabulary=st.sampled_from([33, 500, 2999]), ties=st.sampled_from(["group", "index"]), seed=st.integers(0, 2**31)
)
def test_per_token_settings_agree_with_a_float64_sort(vocabulary, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack([make_row(kind, vocabulary, generator) for kind in KINDS])
    k = torch.tensor([0, 1, 3, 40, 300, 5000])[torch.randint(0, 6, (len(KINDS),), generator=generator)]
    p = torch.tensor([0.3, 0.9, 0.999, 1.0])[torch.randint(0, 4, (len(KINDS),), generator=generator)].double()
    temperature = torch.tensor([0.5, 1.0, 1.3])[torch.randint(0, 3, (len(KINDS),), generator=generator)]
    compare(rows, SamplingParams(temperature, k, p), ties, chunk_size=2)


@pytest.mark.parametrize("ties", ["group", "index"])
@pytest.mark.parametrize(("top_k", "top_p"), [(4500, 1.0), (5000, 0.95), (None, 0.97)])
def test_a_top_k_beyond_all_candidates_is_counted(top_k, top_p, ties):
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([make_row(kind, 6007, generator) for kind in KINDS])
    compare(rows, SamplingParams(1.0, top_k, top_p), ties)


@pytest.mark.parametrize("ties", ["group", "index"])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.95), (4500, 1.0)])
def test_ties_beyond_the_candidates_are_cut_in_float64(top_k, top_p, ties):
    """Whose last bits are not zero, and beside which lie the next floats."""
    rows = torch.full((2, 6007), 2.5, dtype=torch.float64) / 0.7
    rows[1, ::2] = torch.nextafter(rows[1, ::2], torch.tensor(9.0, dtype=torch.float64))
    compare(rows, SamplingParams(1.0, top_k, top_p), ties)


@pytest.mark.parametrize("sampling", [SamplingParams(0.8), SamplingParams(0.8, 5), SamplingParams(1.3, 9, 0.8)])
def test_gradcheck(sampling):
    logits = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    targets = logits[:, :19].topk(3).indices[:, 1].contiguous()

    def outputs(x):
        found = support_logprobs(x, targets, sampling, vocab_size=19, entropy=True)
        return found.filtered, found.unfiltered, found.entropy

    assert torch.autograd.gradcheck(outputs, (logits,))


def test_chunk_size_changes_nothing():
    """Case C23: chunk sizes 1, 7, T, more than T, and T = 0."""
    logits = (torch.randn(23, 700) * 3).requires_grad_()
    targets = logits.argmax(-1)
    targets[5] = -1
    results = []
    for chunk_size in (None, 1, 7, 23, 100):
        found = support_logprobs(logits, targets, SamplingParams(1.0, None, 0.9), entropy=True, chunk_size=chunk_size)
        loss = found.filtered.sum() + found.unfiltered.sum() + found.entropy.sum()
        results.append([found.filtered, found.unfiltered, found.entropy, *torch.autograd.grad(loss, logits)])
    for result in results[1:]:
        for mine, theirs in zip(result, results[0], strict=True):
            assert torch.equal(mine, theirs)
    empty = torch.zeros(0, 700, requires_grad=True)
    found = support_logprobs(empty, torch.zeros(0, dtype=torch.int64), SamplingParams(1.0, 5), entropy=True)
    found.filtered.sum().backward()
    assert found.filtered.shape == (0,) and empty.grad.shape == (0, 700)


def test_no_full_precision_copy_is_made():
    """Case C23: bf16 logits are converted a few rows at a time; the peak is far below a float32 copy of them."""
    logits = torch.randn(512, 16032).bfloat16()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != logits.data_ptr():
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        support_logprobs(logits, logits.argmax(-1), SamplingParams(0.7, 50, 0.9), entropy=True)
    assert 0 < largest <= 4 << 20 < logits.numel() * 4 / 7


def test_top_k_renormalises():
    """Case C5: an engine that renormalises gives log softmax over [2, 1]: -log(1 + e^-1) = -.313262."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4, 4)
    found = support_logprobs(logits, torch.arange(4), SamplingParams(1.0, 2))
    torch.testing.assert_close(
        found.filtered, torch.tensor([-0.313262, -1.313262, -math.inf, -math.inf]), atol=1e-6, rtol=0
    )
    assert found.in_support.tolist() == [True, True, False, False]


def test_entropy_ignores_impossible_tokens():
    """Case C6: logits [0, 0, -inf] have entropy log 2 with gradient 0; xlogy(p, p) would give a NaN gradient."""
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    found = support_logprobs(logits, torch.tensor([0]), SamplingParams(), entropy=True)
    torch.testing.assert_close(found.entropy, torch.tensor([math.log(2)]))
    found.entropy.sum().backward()
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_temperature_applies_once_to_everything():
    """Case C20: logits [2, 1, 0] at temperature .5."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)
    found = support_logprobs(logits, torch.arange(3), SamplingParams(0.5), entropy=True)
    want = torch.tensor([-0.142932, -2.142932, -4.142932])
    torch.testing.assert_close(found.unfiltered, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.filtered, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.entropy, torch.full((3,), 0.441057), atol=1e-6, rtol=0)


def test_logits_survive_and_order_does_not_matter():
    """Case C21: entropy .832396 of [2, 1, 0] whichever output comes first; logits untouched."""
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    before = logits.detach().clone()
    found = support_logprobs(logits, torch.tensor([0]), SamplingParams(), entropy=True)
    assert found.entropy.item() == pytest.approx(0.832396, abs=1e-6)
    (first,) = torch.autograd.grad(found.entropy.sum() + found.unfiltered.sum(), logits, retain_graph=True)
    (second,) = torch.autograd.grad(found.unfiltered.sum() + found.entropy.sum(), logits)
    assert torch.equal(first, second) and torch.equal(logits.detach(), before)


def test_results_of_bf16_logits_are_float32():
    """Case C22: a log-probability near -10.83 keeps its digits; in bf16 it would be -10.8125."""
    logits = torch.zeros(1, 50257, dtype=torch.bfloat16)
    found = support_logprobs(logits, torch.tensor([3]), SamplingParams())
    assert found.unfiltered.dtype == torch.float32
    assert found.unfiltered.item() == pytest.approx(-math.log(50257), abs=2e-6)


def test_rows_without_a_target_or_an_upstream_gradient_hold_anything():
    """NaN and -inf logits there touch no value and no gradient."""
    logits = torch.randn(6, 400)
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[4] = math.nan
    leaf = logits.clone().requires_grad_()
    targets = torch.tensor([3, -1, -1, 5, 7, -100])
    found = support_logprobs(leaf, targets, SamplingParams(1.0, 300, 0.9), entropy=True)
    for output in (found.filtered, found.unfiltered, found.entropy):
        assert output[[1, 2, 5]].tolist() == [0.0, 0.0, 0.0]
    assert found.in_support[[1, 2, 5]].all()
    assert found.filtered[4].isnan() and found.unfiltered[4].isnan() and found.in_support[4]
    valid = torch.tensor([True, False, False, True, False, False])
    torch.where(valid, found.unfiltered + found.entropy, 0.0).sum().backward()
    assert torch.isfinite(leaf.grad).all() and not leaf.grad[~valid].any()


def test_a_target_that_is_no_token_is_a_fault_where_it_is_not_checked(monkeypatch):
    """On an accelerator ids are not read by the host: such a target gives NaN, never a quiet exclusion."""
    monkeypatch.setattr("megatron_support.support.api.check_targets", lambda targets, shard: None)
    found = support_logprobs(torch.randn(2, 40), torch.tensor([40, 3]), SamplingParams(1.0, 40 - 1), vocab_size=40)
    assert found.filtered[0].isnan() and found.unfiltered[0].isnan() and found.in_support[0]
    assert torch.isfinite(found.filtered[1])


def test_padded_columns_hold_no_mass_and_no_top_k_slot():
    logits = torch.randn(5, 40) * 2
    padded = torch.cat([logits, torch.full((5, 9), 99.0)], 1).requires_grad_()
    targets = logits.topk(2).indices[:, 1].contiguous()
    for sampling in (SamplingParams(), SamplingParams(1.0, 2), SamplingParams(1.0, 30, 0.7)):
        plain = support_logprobs(logits, targets, sampling, entropy=True)
        found = support_logprobs(padded, targets, sampling, vocab_size=40, entropy=True)
        assert torch.equal(plain.filtered, found.filtered) and torch.equal(plain.entropy, found.entropy)
        (grad,) = torch.autograd.grad(
            found.unfiltered.sum() + torch.where(found.in_support, found.filtered, 0).sum(), padded
        )
        assert not grad[:, 40:].any()


def test_any_leading_shape():
    logits = torch.randn(2, 3, 4, 50)
    targets = torch.randint(0, 50, (2, 3, 4))
    p = torch.rand(2, 3, 4) * 0.5 + 0.4
    found = support_logprobs(logits, targets, SamplingParams(1.0, None, p), entropy=True)
    flat = support_logprobs(logits.view(24, 50), targets.view(24), SamplingParams(1.0, None, p.view(24)))
    assert found.filtered.shape == found.in_support.shape == (2, 3, 4)
    assert torch.equal(found.filtered.view(24), flat.filtered)


def test_inplace_backward_gives_the_same_gradient_in_the_logits_storage():
    weight = torch.randn(60, 8, requires_grad=True)
    hidden = torch.randn(7, 8)
    targets = torch.randint(0, 50, (7,))
    grads = []
    for inplace in (False, True):
        logits = hidden @ weight.t()
        found = support_logprobs(
            logits, targets, SamplingParams(0.9, 20, 0.9), vocab_size=50, entropy=True, inplace_backward=inplace
        )
        caught = []
        logits.register_hook(lambda grad, caught=caught: caught.append(grad.data_ptr()))
        loss = torch.where(found.in_support, found.filtered, 0.0).sum() + found.entropy.sum()
        grads.append(torch.autograd.grad(loss, weight)[0])
        assert (caught[0] == logits.data_ptr()) == inplace
    assert torch.equal(*grads)


def test_inplace_backward_is_refused_where_the_logits_are_needed():
    leaf = torch.randn(3, 10, requires_grad=True)
    for logits in (leaf, leaf.view(3, 10)):
        with pytest.raises(ValueError, match="inplace_backward would overwrite"):
            support_logprobs(logits, torch.zeros(3, dtype=torch.int64), SamplingParams(), inplace_backward=True)
    logits = leaf * 1.0
    found = support_logprobs(logits, torch.zeros(3, dtype=torch.int64), SamplingParams(), inplace_backward=True)
    other = logits.square().sum()  # saves the logits: autograd sees that they were overwritten
    found.unfiltered.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_nothing_is_saved_without_a_gradient():
    logits = torch.randn(3, 10, requires_grad=True)
    with torch.no_grad():
        found = support_logprobs(logits, torch.zeros(3, dtype=torch.int64), SamplingParams(1.0, 3), entropy=True)
    assert found.filtered.grad_fn is None
    found = support_logprobs(logits.detach(), torch.zeros(3, dtype=torch.int64), SamplingParams(1.0, 3))
    assert found.filtered.grad_fn is None


def test_a_second_derivative_and_vmap_raise():
    logits = torch.randn(3, 10, requires_grad=True)
    targets = torch.zeros(3, dtype=torch.int64)
    found = support_logprobs(logits, targets, SamplingParams())
    (grad,) = torch.autograd.grad(found.unfiltered.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda x: support_logprobs(x, targets, SamplingParams()).unfiltered)(torch.randn(2, 3, 10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(4, dtype=torch.int64)}, "targets must have the logits' shape"),
        ({"targets": torch.zeros(3)}, "must be int64"),
        ({"targets": torch.tensor([0, 10, 1])}, "target 10 at flat position 1"),
        ({"logits": torch.zeros(3, 10, dtype=torch.int64)}, "must be bf16, fp16, fp32 or fp64"),
        ({"vocab_size": 11}, "vocab_size must be in"),
        ({"vocab_size": 0}, "vocab_size must be in"),
        ({"ties": "first"}, 'ties must be "group" or "index"'),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"sampling": SamplingParams(torch.ones(2))}, "temperature has 2 entries"),
        ({"sampling": SamplingParams(1.0, torch.ones(4, dtype=torch.int64))}, "top_k has 4 entries"),
    ],
)
def test_errors_name_value_and_rule(change, message):
    arguments = {
        "logits": torch.zeros(3, 10),
        "targets": torch.zeros(3, dtype=torch.int64),
        "sampling": SamplingParams(),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        support_logprobs(arguments.pop("logits"), arguments.pop("targets"), arguments.pop("sampling"), **arguments)
