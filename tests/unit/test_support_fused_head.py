"""The fused head: the same numbers as head and log-probabilities apart, without their logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_support import RolloutSupport, SamplingParams, support_logprobs
from megatron_support.support import fused_support_logprobs

SETTINGS = [SamplingParams(0.8), SamplingParams(1.0, 20), SamplingParams(0.7, 50, 0.9), SamplingParams(1.0, None, 0.6)]


def make(tokens=11, width=16, columns=300, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(columns, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(columns, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, columns - 7, (tokens,), generator=generator)
    targets[[2, 3]] = -1
    return hidden, weight, bias, targets


def loss_of(found) -> torch.Tensor:
    coefficients = torch.linspace(-1, 1, found.filtered.numel(), dtype=found.filtered.dtype)
    value = torch.where(found.in_support, found.filtered, 0.0) + 2 * found.unfiltered
    return (value * coefficients).sum() + (found.entropy * coefficients.flip(0)).sum()


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 50])
def test_agrees_with_head_and_logprobs_apart(sampling, chunk_size):
    hidden, weight, bias, targets = make()
    found = fused_support_logprobs(
        hidden, weight, targets, sampling, bias=bias, vocab_size=293, entropy=True, chunk_size=chunk_size
    )
    apart = support_logprobs(hidden @ weight.t() + bias, targets, sampling, vocab_size=293, entropy=True)
    assert torch.equal(found.in_support, apart.in_support)
    for name in ("filtered", "unfiltered", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(apart, name), rtol=1e-12, atol=1e-12)
    mine = torch.autograd.grad(loss_of(found), (hidden, weight, bias))
    theirs = torch.autograd.grad(loss_of(apart), (hidden, weight, bias))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ties", ["group", "index"])
@pytest.mark.parametrize("sampling", SETTINGS[1:])
def test_the_sparse_gradient_of_filtered_logprobs_alone(sampling, ties):
    """Only kept tokens' rows of the weight take part; rows near flat fall back to the whole product."""
    hidden, weight, bias, _ = make(tokens=12)
    with torch.no_grad():
        hidden[8:] *= 0.01
        bias *= 0.1
        targets = (hidden @ weight.t() + bias)[:, :293].topk(2).indices[:, 1].contiguous()
    targets[4] = -1
    arguments = {"vocab_size": 293, "ties": ties}
    found = fused_support_logprobs(hidden, weight, targets, sampling, bias=bias, chunk_size=4, **arguments)
    apart = support_logprobs(hidden @ weight.t() + bias, targets, sampling, **arguments)
    assert found.in_support.sum() > 6
    coefficients = torch.linspace(-1, 1, 12, dtype=torch.float64)
    grads = [
        torch.autograd.grad((torch.where(f.in_support, f.filtered, 0.0) * coefficients).sum(), (hidden, weight, bias))
        for f in (found, apart)
    ]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_sparse_backward_makes_no_product_over_the_vocabulary():
    hidden, weight, _, _ = make(tokens=32, columns=5000, dtype=torch.float32)
    targets = (hidden @ weight.t()).argmax(-1)
    found = fused_support_logprobs(hidden, weight, targets, SamplingParams(1.0, 5), chunk_size=8)
    shapes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                shapes.append((tuple(args[0].shape), tuple(args[1].shape)))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.autograd.grad(found.filtered.sum(), (hidden, weight))
    assert len(shapes) == 8 and all(max(a + b) <= 40 for a, b in shapes)


def test_replay_and_per_token_settings_follow_their_tokens_into_chunks():
    hidden, weight, _, targets = make()
    sets = [[int(t), (int(t) + 5) % 293] if t >= 0 else [] for t in targets]
    sets[6] = []
    lengths = torch.tensor([0] + [len(s) for s in sets])
    support = RolloutSupport(torch.tensor([i for s in sets for i in s]), lengths.cumsum(0))
    temperature = torch.linspace(0.5, 1.5, len(targets))
    for sampling, replayed in (
        (SamplingParams(temperature), support),
        (SamplingParams(temperature, torch.arange(len(targets)), torch.linspace(0.3, 1.0, len(targets))), None),
    ):
        arguments = {"vocab_size": 293, "entropy": True, "support": replayed}
        found = fused_support_logprobs(hidden, weight, targets, sampling, chunk_size=3, **arguments)
        apart = support_logprobs(hidden @ weight.t(), targets, sampling, **arguments)
        torch.testing.assert_close(found.filtered, apart.filtered, rtol=1e-12, atol=1e-12)
        for a, b in zip(*(torch.autograd.grad(loss_of(f), (hidden, weight)) for f in (found, apart)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_bf16_gradients_are_as_good_as_the_ordinary_head():
    """The error against float64 is at most twice that of the same computation with logits kept in bf16."""
    hidden, weight, _, targets = make(tokens=64, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    sampling = SamplingParams()
    want = torch.autograd.grad(
        loss_of(support_logprobs(exact[0] @ exact[1].t(), targets, sampling, entropy=True)), exact
    )
    apart = support_logprobs(hidden @ weight.t(), targets, sampling, entropy=True)
    fused = fused_support_logprobs(hidden, weight, targets, sampling, entropy=True, chunk_size=16)
    ordinary = torch.autograd.grad(loss_of(apart), (hidden, weight))
    mine = torch.autograd.grad(loss_of(fused), (hidden, weight))
    for a, b, exactly in zip(mine, ordinary, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - exactly).norm() <= 2 * (b.double() - exactly).norm()


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_added_to_and_marked_as_megatron_does(grad_dtype):
    hidden, weight, _, targets = make(dtype=torch.bfloat16)
    weight = torch.nn.Parameter(weight.detach())
    plain = fused_support_logprobs(hidden, weight, targets, SamplingParams(1.0, 20), entropy=True)
    (want,) = torch.autograd.grad(loss_of(plain), weight)
    weight.main_grad = torch.ones(weight.shape, dtype=grad_dtype)
    found = fused_support_logprobs(
        hidden, weight, targets, SamplingParams(1.0, 20), entropy=True, accumulate_main_grad=True
    )
    loss_of(found).backward(retain_graph=True)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.float() - 1, want.float(), rtol=0.02, atol=0.02)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    loss_of(found).backward()
    assert weight.grad_added_to_main_grad and not weight.grad.any()
    torch.testing.assert_close(weight.main_grad.float() - 1, 2 * want.float(), rtol=0.02, atol=0.04)


def test_a_tied_embedding_gets_both_gradients():
    _, weight, _, targets = make()
    ids = torch.arange(11)

    def through(head):
        return torch.autograd.grad(loss_of(head(torch.nn.functional.embedding(ids, weight))), weight)[0]

    fused = through(lambda h: fused_support_logprobs(h, weight, targets, SamplingParams(1.0, 9), entropy=True))
    apart = through(lambda h: support_logprobs(h @ weight.t(), targets, SamplingParams(1.0, 9), entropy=True))
    torch.testing.assert_close(fused, apart, rtol=1e-10, atol=1e-10)


def test_all_logits_never_exist_and_only_targets_go_through_the_head():
    hidden, weight, _, targets = make(tokens=64, columns=5000, dtype=torch.float32)
    targets[8:] = -1
    weight.requires_grad_(False)
    largest, products = 0, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest, products
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.out:
                products += args[0].shape[0]
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != weight.data_ptr():
                largest = max(largest, out.numel())
            return out

    with Watch():
        found = fused_support_logprobs(
            hidden, weight, targets, SamplingParams(1.0, 20, 0.9), entropy=True, chunk_size=2
        )
        torch.autograd.grad(loss_of(found), hidden)
    assert products == 2 * 6 and largest < 64 * 5000 / 8
    assert not found.filtered[8:].any()


def test_no_target_at_all_gives_zeros_with_a_graph():
    hidden, weight, _, targets = make()
    found = fused_support_logprobs(hidden, weight, torch.full_like(targets, -1), SamplingParams(1.0, 5), entropy=True)
    grads = torch.autograd.grad(loss_of(found), (hidden, weight))
    assert not found.filtered.any() and not any(g.any() for g in grads)


def test_errors_name_value_and_rule():
    hidden, weight, _, targets = make()
    with pytest.raises(ValueError, match="weight must be"):
        fused_support_logprobs(hidden, weight.t(), targets, SamplingParams())
    with pytest.raises(ValueError, match="targets must have"):
        fused_support_logprobs(hidden, weight, targets[1:], SamplingParams())
    with pytest.raises(ValueError, match=r"needs weight\.main_grad"):
        fused_support_logprobs(hidden, weight, targets, SamplingParams(), accumulate_main_grad=True)
    found = fused_support_logprobs(hidden, weight, targets, SamplingParams())
    grad = torch.autograd.grad(found.unfiltered.sum(), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()
