"""Ways to compute what is measured. A contestant is ``f(tensors, targets, work, group) -> scalar to differentiate``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_support import SamplingParams, fused_support_logprobs, support_logprobs

from .work import Work

Contestant = Callable[..., torch.Tensor]

OURS, IN_PLACE, SORT, CROSS_ENTROPY, VERL, PEER = "ours", "in place", "sort twice", "cross entropy", "verl", "peer"
FUSED, HEAD_FIRST = "fused head", "head, then ours"


def total(filtered, unfiltered, entropy, targets, work: Work) -> torch.Tensor:
    """What is differentiated: the filtered log-probabilities, or the unfiltered ones, and the entropy if asked for."""
    value = torch.where((filtered > -math.inf) & (targets >= 0), filtered, 0.0) if work.filters else unfiltered
    return value.sum() if entropy is None else value.sum() + entropy.sum()


def ours(tensors, targets, work: Work, group, *, inplace: bool) -> torch.Tensor:
    (logits,) = tensors
    options: dict[str, Any] = {"vocab_size": work.vocabulary, "tp_group": group, "entropy": work.entropy}
    sampling = SamplingParams(1.0, work.top_k, work.top_p)
    found = support_logprobs(logits, targets, sampling, inplace_backward=inplace, **options)
    return total(found.filtered, found.unfiltered, found.entropy, targets, work)


def fused_head(tensors, targets, work: Work, group) -> torch.Tensor:
    """The weight's gradient goes to ``main_grad``, as under Megatron's gradient accumulation fusion."""
    options: dict[str, Any] = {"vocab_size": work.vocabulary, "tp_group": group, "entropy": work.entropy}
    options["accumulate_main_grad"] = True
    found = fused_support_logprobs(*tensors, targets, SamplingParams(1.0, work.top_k, work.top_p), **options)
    return total(found.filtered, found.unfiltered, found.entropy, targets, work)


def head_first(tensors, targets, work: Work, group) -> torch.Tensor:
    hidden, weight = tensors
    return ours((hidden @ weight.t(),), targets, work, group, inplace=True)


class SortTwice(torch.autograd.Function):
    """Gather the vocabulary, sort it, filter, take log-softmaxes; filter again in backward."""

    @staticmethod
    def keep(whole, work):
        values, ids = whole.sort(-1, descending=True)
        keep = torch.ones_like(values, dtype=torch.bool)
        if work.top_k is not None:
            keep[:, work.top_k :] = False
        if work.top_p < 1:
            mass = torch.softmax(values.masked_fill(~keep, -math.inf), -1)
            keep &= mass.cumsum(-1) - mass < work.top_p
        return torch.zeros_like(keep).scatter_(1, ids, keep)

    @staticmethod
    def gather(logits, work, group):
        whole = logits.float()
        if group is not None:
            parts = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, whole.contiguous(), group=group)
            whole = torch.cat(parts, 1)
        return whole[:, : work.vocabulary]

    @staticmethod
    def forward(ctx, logits, targets, work, group):
        whole = SortTwice.gather(logits, work, group)
        keep = SortTwice.keep(whole, work)
        filtered = torch.log_softmax(whole.masked_fill(~keep, -math.inf), -1)
        ctx.save_for_backward(logits, targets)
        ctx.work, ctx.group = work, group
        log_p = torch.log_softmax(whole, -1)
        entropy = -(log_p.exp() * log_p).sum(-1) if work.entropy else None
        at = targets[:, None]
        return filtered.gather(1, at).squeeze(1), log_p.gather(1, at).squeeze(1), entropy

    @staticmethod
    def backward(ctx, grad, grad_unfiltered, grad_entropy):
        logits, targets = ctx.saved_tensors
        work, group = ctx.work, ctx.group
        whole = SortTwice.gather(logits, work, group)
        if work.filters:
            keep = SortTwice.keep(whole, work)
            kept_target = keep.gather(1, targets[:, None]).squeeze(1)
            share = torch.softmax(whole.masked_fill(~keep, -math.inf), -1)
            grad = torch.where(kept_target, grad, 0.0)
        else:
            share, grad = torch.softmax(whole, -1), grad_unfiltered
        gradient = share.mul_(-grad[:, None]).scatter_add_(1, targets[:, None], grad[:, None])
        if work.entropy:
            log_p = torch.log_softmax(whole, -1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1, keepdim=True)
            gradient -= grad_entropy[:, None] * p * (log_p + entropy)
        if group is not None:
            columns = logits.shape[1]
            missing = columns * dist.get_world_size(group) - work.vocabulary
            gradient = torch.nn.functional.pad(gradient, (0, missing))
            gradient = gradient[:, columns * dist.get_rank(group) :][:, :columns]
        return gradient.to(logits.dtype), None, None, None


def sort_twice(tensors, targets, work: Work, group) -> torch.Tensor:
    return total(*SortTwice.apply(tensors[0], targets, work, group), targets, work)


def _megatron_groups() -> None:
    """Megatron's cross-entropies find their group in its global state."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())


def find_cross_entropy() -> Contestant | str:
    """Megatron's vocabulary-parallel cross-entropy, which destroys the logits; or why it is left out."""
    try:
        from megatron_support.megatron.host import prepare_import

        prepare_import()
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    except ImportError as error:
        return f"megatron-core cannot be imported ({error})"

    def run(tensors, targets, work, group):
        _megatron_groups()
        return vocab_parallel_cross_entropy(tensors[0].unsqueeze(1), targets.unsqueeze(1)).sum()

    return run


def find_verl() -> Contestant | str:
    """verl's log-probabilities and entropy without a filter; or why they are left out."""
    if importlib.util.find_spec("verl") is None:
        return "verl is not installed"
    try:
        from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
        from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
    except ImportError as error:
        return f"verl is installed, but cannot be imported here ({error})"

    def run(tensors, targets, work, group):
        (logits,) = tensors
        if group is None:
            entropy = entropy_from_logits(logits) if work.entropy else None
            logprobs = logprobs_from_logits(logits, targets)
        else:
            _megatron_groups()
            # its engine clones: the log-probabilities destroy the logits that the entropy saved
            entropy = vocab_parallel_entropy(logits.clone()) if work.entropy else None
            logprobs = vocab_parallel_log_probs_from_logits(logits.unsqueeze(1), targets.unsqueeze(1))
        return logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()

    return run


def load_peer(place: str | None) -> Contestant | str:
    """``FILE:FUNCTION``: ``f(logits, targets, top_k, top_p, want_entropy=...) -> filtered, unfiltered, entropy``."""
    if place is None:
        return "no --peer was given"
    path, _, name = place.partition(":")
    spec = importlib.util.spec_from_file_location("bench_peer", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--peer {place}: {path} is not a Python file; give FILE:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name or "support_logprobs")

    def run(tensors, targets, work, group):
        return total(*function(tensors[0], targets, work.top_k, work.top_p, want_entropy=work.entropy), targets, work)

    return run


NAMES = (OURS, IN_PLACE, SORT, CROSS_ENTROPY, VERL, PEER, FUSED, HEAD_FIRST)


def find_contestants(
    names: Iterable[str] = NAMES, peer: str | None = None
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Contestants by name, and why those that are left out are."""
    finders: dict[str, Callable[[], Contestant | str]] = {
        OURS: lambda: partial(ours, inplace=False),
        IN_PLACE: lambda: partial(ours, inplace=True),
        SORT: lambda: sort_twice,
        CROSS_ENTROPY: find_cross_entropy,
        VERL: find_verl,
        PEER: lambda: load_peer(peer),
        FUSED: lambda: fused_head,
        HEAD_FIRST: lambda: head_first,
    }
    found = {name: finders[name]() for name in names}
    missing = {name: value for name, value in found.items() if isinstance(value, str)}
    return {name: value for name, value in found.items() if not isinstance(value, str)}, missing


def rivals(work: Work, ranks: int, *, sort: bool) -> list[str]:
    """Names of the contestants, beside ours, that do this work."""
    names = [SORT] if sort else []
    if not work.filters:
        names += [VERL] if work.entropy else [CROSS_ENTROPY, VERL]
    return names + ([PEER] if ranks == 1 else [])
