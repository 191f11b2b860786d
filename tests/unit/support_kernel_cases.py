"""Cases of the device kernels for Triton's interpreter.

The interpreter must be chosen before Triton is imported, so ``test_support_kernels.py`` runs this file in a process of
its own; pytest does not collect it by itself.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction

from megatron_support import RolloutSupport, SamplingParams, support_logprobs
from megatron_support.support import api, arguments, kernels
from tests.ranks import run_ranks

TOKENS, VOCABULARY, PADDING = 9, 333, 3


@pytest.fixture
def interpreted(monkeypatch):
    """The whole of support_logprobs with its device kernels, on CPU tensors; none may fail."""
    from megatron_support.support.kernels import boundary, gradient, selection, statistics

    # the interpreter patches Triton's language for a kernel, and again at every call of a function in it: half of the
    # time. Once is enough where a kernel's module names all that Triton's own functions use
    monkeypatch.setattr(InterpretedFunction, "__call__", lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs))
    for module in (boundary, gradient, selection, statistics):
        monkeypatch.setattr(module, "core", tl.core, raising=False)
        monkeypatch.setattr(module, "BLOCK", 512 if module is selection else 128)
    for module in (boundary, statistics):
        monkeypatch.setattr(module, "_SPLITS", 2)
    monkeypatch.setattr(boundary, "_PROGRAMS", 3)
    monkeypatch.setattr(kernels, "runs_on", lambda device: True)
    started = []
    launch = kernels.launch

    def counted(kernel, *arguments, **options):
        started.append(kernel.__name__)
        launch(kernel, *arguments, **options)

    for module in (boundary, gradient, selection, statistics):
        monkeypatch.setattr(module, "launch", counted)
    monkeypatch.setattr(kernels._State, "failed", False)
    yield started
    assert not kernels._State.failed


def plainly(monkeypatch, function, *arguments, **options):
    """What plain torch makes of it."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "runs_on", lambda device: False)
        return function(*arguments, **options)


@dataclass(frozen=True)
class Outcome:
    outputs: list[torch.Tensor]
    in_support: torch.Tensor
    gradient: torch.Tensor


def run(logits: torch.Tensor, sampling: SamplingParams, which: str, *, inplace: bool = False, **options) -> Outcome:
    """Outputs and a gradient; one row has no target, and one no upstream gradient."""
    leaf = logits.clone().requires_grad_()
    targets = logits.float().masked_fill(logits.isnan(), 0.0)[:, : VOCABULARY - PADDING].topk(3).indices[:, 1]
    targets = targets.contiguous()
    targets[2] = -1
    options = {"vocab_size": VOCABULARY - PADDING, "entropy": "entropy" in which, **options}
    found = support_logprobs(leaf * 1.0, targets, sampling, inplace_backward=inplace, **options)
    upstream = torch.linspace(-1, 1, logits.shape[0], device=logits.device)
    upstream[5] = 0.0
    terms = {"filtered": found.filtered, "unfiltered": found.unfiltered, "entropy": found.entropy}
    # a masked_fill leaves the row without a target in, with an upstream gradient
    loss = sum((terms[n].masked_fill(~found.in_support | (upstream == 0), 0.0) * upstream).sum() for n in which.split())
    (gradient,) = torch.autograd.grad(loss, leaf)
    outputs = [t.detach() for t in terms.values() if t is not None]
    return Outcome(outputs, found.in_support, gradient)


def make_logits(dtype: torch.dtype, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Rows that end in different passes, and some that are out of the ordinary."""
    logits = torch.randn(TOKENS, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, :9] += torch.linspace(12, 16, 9)  # peaked
    logits[1] *= 1000
    logits[2] = math.nan  # without a target
    logits[3] = (logits[3] * 2).round()  # ties, at the boundary too
    logits[4] = -3.25  # nothing but ties: more than the candidates' buffer takes
    logits[5] = math.nan  # without an upstream gradient
    logits[6, 10:200] = -math.inf
    logits[8] *= 0.01  # flat; row 7 is broad
    logits[:, vocabulary - PADDING :] = 1e4
    return logits.to(dtype)


MIXED = SamplingParams(torch.linspace(0.5, 1.5, TOKENS), None, torch.linspace(0.3, 1.0, TOKENS))
FILTERS = {
    "none": SamplingParams(),
    "temperature": SamplingParams(0.7),
    "top_k": SamplingParams(0.7, 20),
    "top_k 1": SamplingParams(1.3, 1),
    "top_p": SamplingParams(1.0, None, 0.9),
    "top_p, tiny": SamplingParams(1.0, None, 1e-4),
    "both": SamplingParams(1.0, 40, 0.8),
    "mixed": MIXED,
}


def assert_same(mine: Outcome, other: Outcome, dtype: torch.dtype) -> None:
    for ours, theirs in zip(mine.outputs, other.outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert mine.in_support.equal(other.in_support)
    relative = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(mine.gradient, other.gradient, rtol=relative, atol=1e-6)
    assert not mine.gradient[[2, 5]].any()
    assert not mine.gradient[:, VOCABULARY - PADDING :].any()


class NoHostReads(TorchDispatchMode):
    """Refuses what makes the host wait for a device: values of tensors, and results whose shape they decide."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"{func} reads a device's result on the host"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{func} by a mask reads a device's result on the host"
        if name == "repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None, f"{func} reads its size on the host"
        return func(*args, **(kwargs or {}))


CASES = [
    (name, which, ties, torch.float32)
    for name in FILTERS
    for which, ties in (("filtered", "index"), ("filtered unfiltered entropy", "group"))
]
CASES += [("both", "filtered unfiltered entropy", "index", dtype) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("name", "which", "ties", "dtype"), CASES)
def test_kernels_agree_with_plain_torch(interpreted, monkeypatch, name, which, ties, dtype):
    """Few candidates, so that peaked rows find their boundary among them and broad ones do not."""
    monkeypatch.setattr(arguments, "_TOP_P_CANDIDATES", 24)
    logits = make_logits(dtype)
    mine = run(logits, FILTERS[name], which, ties=ties, inplace=ties == "index")
    assert {"_statistics_kernel", "_gradient_kernel"} <= set(interpreted)
    assert ("_select_kernel" in interpreted) == FILTERS[name].filters
    assert_same(mine, plainly(monkeypatch, run, logits, FILTERS[name], which, ties=ties), dtype)


@pytest.mark.parametrize(
    ("top_k", "ties"), [(40, "index"), (torch.tensor([40, 0, 3, 200, 329, 5, 100, 7, 64]), "group")]
)
def test_a_top_k_beyond_the_candidates_is_searched_by_count(interpreted, monkeypatch, top_k, ties):
    for name in ("_MOST_CANDIDATES", "_DEVICE_TOP_K", "_TOP_P_CANDIDATES"):
        monkeypatch.setattr(arguments, name, 8)
    monkeypatch.setattr(arguments, "_SPARE_CANDIDATES", 2)
    logits, sampling = make_logits(torch.float32), SamplingParams(1.0, top_k, 0.95)
    mine = run(logits, sampling, "filtered", ties=ties)
    assert interpreted.count("_histogram_kernel") == 10
    assert_same(mine, plainly(monkeypatch, run, logits, sampling, "filtered", ties=ties), torch.float32)


def test_a_replayed_support(interpreted, monkeypatch):
    """Sets of three; the last token has none."""
    logits = make_logits(torch.float32)[:, : VOCABULARY - PADDING].nan_to_num(0.0)
    ids = logits.topk(3).indices[:-1].flatten()
    support = RolloutSupport(ids, torch.tensor([*range(0, ids.numel() + 1, 3), ids.numel()]))
    mine = run(logits, SamplingParams(0.9), "filtered entropy", support=support)
    other = plainly(monkeypatch, run, logits, SamplingParams(0.9), "filtered entropy", support=support)
    for ours, theirs in zip(mine.outputs, other.outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(mine.gradient, other.gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "ties"), [("none", "group"), ("top_k", "group"), ("top_p", "group"), ("mixed", "index")]
)
def test_the_host_reads_nothing(interpreted, monkeypatch, name, ties):
    """Whether or not rows need the search, forward and backward."""
    monkeypatch.setattr(arguments, "_TOP_P_CANDIDATES", 24)
    monkeypatch.setattr(api, "check_targets", lambda targets, shard: None)  # made for CPU tensors alone
    logits = make_logits(torch.float32)
    leaf = logits.clone().requires_grad_()
    targets = torch.arange(TOKENS) * 7 - 7
    with NoHostReads():
        found = support_logprobs(leaf, targets, FILTERS[name], vocab_size=VOCABULARY - PADDING, ties=ties)
        upstream = torch.where(found.in_support & (targets >= 0), 1.0, 0.0)
        found.filtered.backward(upstream)
    assert leaf.grad[3].any() or not bool(found.in_support[3])
    if name != "none":
        with pytest.raises(AssertionError, match="host"), NoHostReads():
            plainly(monkeypatch, run, logits, FILTERS[name], "filtered", ties=ties)


class Broken:
    """A kernel that cannot be compiled."""

    __name__ = "_broken_kernel"

    def __getitem__(self, grid):
        raise RuntimeError("no C compiler\nfound")


@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        ("statistics", "_statistics_kernel"),
        ("selection", "_select_kernel"),
        ("boundary", "_histogram_kernel"),
        ("gradient", "_gradient_kernel"),
        ("gradient", "_scatter_kernel"),
    ],
)
def test_plain_torch_takes_over_from_a_kernel_that_fails(interpreted, monkeypatch, caplog, module, kernel):
    """With one line in the log; where the gradient is made in place, the logits may be gone by then."""
    monkeypatch.setattr(arguments, "_TOP_P_CANDIDATES", 24)
    logits, sampling = make_logits(torch.float32), FILTERS["both" if kernel == "_select_kernel" else "top_p"]
    other = plainly(monkeypatch, run, logits, sampling, "filtered")
    monkeypatch.setattr(f"megatron_support.support.kernels.{module}.{kernel}", Broken())
    with caplog.at_level(logging.INFO):
        assert_same(run(logits, sampling, "filtered", inplace=True), other, torch.float32)
        started = len(interpreted)
        assert_same(run(logits, sampling, "filtered", inplace=True), other, torch.float32)
    assert len(interpreted) == started
    (line,) = caplog.messages
    assert "broken_kernel" in line and "no C compiler" in line and "\n" not in line
    kernels._State.failed = False


@pytest.mark.parametrize(("name", "ties"), [("both", "index"), ("top_p", "group"), ("none", "group")])
def test_two_ranks_agree_with_one(interpreted, monkeypatch, name, ties):
    """One row has its finite logits on one rank alone, another one has none, and is at fault."""
    monkeypatch.setattr(arguments, "_TOP_P_CANDIDATES", 24)
    logits = make_logits(torch.float32, 334)[:, :334]
    logits[8, :167] = logits[2] = -math.inf
    targets = torch.arange(TOKENS) * 36 - 1

    def evaluate(part: torch.Tensor, group) -> list[torch.Tensor]:
        leaf = part.clone().requires_grad_()
        options = {"vocab_size": 331, "tp_group": group, "ties": ties, "entropy": True}
        found = support_logprobs(leaf, targets, FILTERS[name], **options)
        kept = found.filtered.masked_fill(~found.in_support, 0.0)
        kept[[0, 1, 3, 4, 6, 7, 8]].sum().backward()
        return [t.detach() for t in (found.filtered, found.unfiltered, found.entropy, leaf.grad)]

    def on_rank(rank: int, world: int) -> list[torch.Tensor]:
        return evaluate(logits[:, 167 * rank :][:, :167], torch.distributed.group.WORLD)

    whole = plainly(monkeypatch, evaluate, logits, None)
    ranks = run_ranks(2, on_rank)
    assert not kernels._State.failed
    for rank in ranks:
        for mine, other in zip(rank[:3], whole, strict=False):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(torch.cat([r[3] for r in ranks], 1), whole[3], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("columns", "count"), [(1000, 5), (333, 200), (64, 64), (7, 7)])
def test_candidates_are_the_largest_logits(interpreted, columns, count):
    from megatron_support.support.kernels.selection import group_size, largest_logits

    logits = torch.randn(4, columns, generator=torch.Generator().manual_seed(1))
    logits[1] = logits[1].round()
    logits[2] = logits[2].sort().values  # all in neighbouring groups
    group = group_size(count, columns)
    padded = torch.nn.functional.pad(logits, (0, -columns % group), value=-math.inf)
    rows, targets = torch.tensor([3, 1, 2, 0]), torch.tensor([0, 5, 1, -1])
    maxima = padded.unflatten(1, (-1, group)).amax(2)[rows]
    values, places = largest_logits(logits, rows, None, targets, maxima, group, count)
    assert values[:3].equal(logits[rows].topk(count).values[:3])
    assert values[:3].equal(logits[rows].gather(1, places)[:3])
    assert all(row.unique().numel() == count for row in places[:3])
    assert (values[3] == -math.inf).all()


@pytest.mark.parametrize("by_count", [False, True])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e6])
def test_histograms_find_the_boundary(interpreted, by_count, scale):
    """Against a sort in float64, on rows that span many floats, and few."""
    from megatron_support.support.kernels.boundary import ROUNDS, Search, histogram, narrow

    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)) * scale
    logits[2] = (logits[2] * 4 / scale).round() * scale / 4
    index, maximum = torch.arange(3), logits.amax(1)
    mass = (logits.double() - maximum[:, None].double()).exp()
    amount = torch.full((3,), 321.0, dtype=torch.float64) if by_count else mass.sum(1) * 0.77
    search = Search.of(torch.tensor([True, False, True]), amount, by_count=by_count)
    for turn in range(ROUNDS):
        histogram(logits, index, None, maximum, search, turn)
        narrow(search, maximum, turn)
    for row in (0, 2):
        values = logits[row].unique()
        above = torch.stack([mass[row][logits[row] > v].sum() for v in values])
        number = torch.stack([(logits[row] > v).sum() for v in values])
        at = int(((number if by_count else above) < amount[row]).nonzero()[0])
        assert search.value()[row] == values[at]
        assert search.count_above()[row] == number[at]
        assert search.ties()[row] == (logits[row] == values[at]).sum()
        torch.testing.assert_close(search.mass_above()[row], above[at], rtol=1e-6, atol=1e-9)
    assert not search.mass.any() and not search.counts.any()
