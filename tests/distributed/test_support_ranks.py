"""The same support, outputs and gradients for every split of the vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_support import RolloutSupport, SamplingParams, support_logprobs
from megatron_support.support import compare_supports, token_logprobs
from tests.ranks import run_ranks

FILTERS = [
    (None, 1.0),
    (None, 0.9),
    (None, 0.999),
    (20, 1.0),
    (50, 0.9),
    (600, 0.95),
    (1, 1.0),
]


def _rows(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Peaked, broad, flat, tied and constant rows."""
    generator = torch.Generator().manual_seed(vocabulary)
    scales = (8.0, 3.0, 1.0, 0.3, 0.01, 0.0)
    rows = [torch.randn(2, vocabulary, generator=generator) * scale for scale in scales]
    rows.append(torch.randint(-3, 4, (2, vocabulary), generator=generator).float())
    return torch.cat(rows).to(dtype)


def _sampling(tokens: int, top_k, top_p, tensors: bool) -> SamplingParams:
    if not tensors:
        return SamplingParams(0.7, top_k, top_p)
    p = torch.linspace(0.3, 1.0, tokens)
    k = torch.tensor([0, 1, 5, 40, 900, 3]).repeat(tokens)[:tokens]
    return SamplingParams(torch.linspace(0.5, 1.5, tokens), k, p)


def _measure(logits, targets, sampling, vocabulary, group, ties):
    leaf = logits.clone().requires_grad_()
    found = support_logprobs(
        leaf, targets, sampling, vocab_size=vocabulary, tp_group=group, entropy=True, ties=ties, chunk_size=3
    )
    inside = found.in_support
    loss = torch.where(inside, found.filtered, 0.0).sum()
    (sparse,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (dense,) = torch.autograd.grad(loss + 2 * found.unfiltered.sum() + 3 * found.entropy.sum(), leaf)
    return [t.detach() for t in (found.filtered, found.unfiltered, found.entropy, inside)], sparse, dense


def _on_rank(rank, world, vocabulary, columns, dtype):
    """Every case on this rank's shard: outputs, and this rank's gradient columns."""
    results = []
    logits = _rows(vocabulary, dtype)
    padded = torch.full((logits.shape[0], columns * world), 50.0, dtype=dtype)  # padding must hold no mass
    padded[:, :vocabulary] = logits
    shard = padded[:, columns * rank : columns * (rank + 1)].contiguous()
    for case in _cases(logits, vocabulary):
        results.append(_measure(shard, *case[:2], vocabulary, dist.group.WORLD, case[2]))
    return results


def _cases(logits, vocabulary):
    order = logits.float().argsort(-1, descending=True)
    pick = torch.arange(logits.shape[0]) % 7 * 9 % vocabulary
    targets = order.gather(1, pick[:, None]).squeeze(1)
    targets[3] = -1
    for (top_k, top_p), ties in itertools.product(FILTERS, ("group", "index")):
        yield targets, _sampling(len(targets), top_k, top_p, False), ties
    yield targets, _sampling(len(targets), None, None, True), "group"


@pytest.mark.parametrize(
    ("world", "vocabulary", "dtype"),
    [
        (2, 2048, torch.float32),
        (4, 2048, torch.bfloat16),
        (8, 2048, torch.float32),
        (2, 2035, torch.bfloat16),
        (4, 2035, torch.float32),
        (2, 37, torch.float32),
        (4, 37, torch.bfloat16),
        (4, 9, torch.float32),
    ],
)
def test_every_split_agrees_with_one_rank(world, vocabulary, dtype):
    columns = -(-vocabulary // world) if vocabulary < 100 else 2048 // world
    if vocabulary == 9:
        columns = 4  # widths 4, 4, 1, 0: a rank with padding alone
    logits = _rows(vocabulary, dtype)
    # the ends of rows that do not fill a vector register are computed by another instruction, off by one bit
    rounding = 0.0 if vocabulary % 16 == 0 else 1e-6
    ranks = run_ranks(world, _on_rank, vocabulary, columns, dtype)
    for number, (targets, sampling, ties) in enumerate(_cases(logits, vocabulary)):
        outputs, sparse, dense = _measure(logits, targets, sampling, vocabulary, None, ties)
        for rank in range(world):
            for mine, theirs in zip(outputs, ranks[rank][number][0], strict=True):
                torch.testing.assert_close(theirs, mine, rtol=rounding, atol=rounding)
        for which, mine in ((1, sparse), (2, dense)):
            joined = torch.cat([ranks[rank][number][which] for rank in range(world)], 1)
            torch.testing.assert_close(
                joined[:, :vocabulary], mine, rtol=2**-8 if dtype.itemsize == 2 else 0, atol=3e-7
            )
            assert not joined[:, vocabulary:].any()


def _replayed(rank, world, logits, vocabulary, sets, targets):
    columns = -(-vocabulary // world)
    padded = torch.nn.functional.pad(logits, (0, columns * world - vocabulary), value=9.0)
    shard = padded[:, columns * rank : columns * (rank + 1)].clone().requires_grad_()
    group = dist.group.WORLD if world > 1 else None
    found = support_logprobs(
        shard, targets, SamplingParams(0.8, 5), vocab_size=vocabulary, tp_group=group, support=sets, entropy=True
    )
    (sparse,) = torch.autograd.grad(found.filtered.sum(), shard, retain_graph=True)
    (dense,) = torch.autograd.grad(found.filtered.sum() + found.unfiltered.sum() + found.entropy.sum(), shard)
    metrics = compare_supports(
        shard, targets, SamplingParams(0.8, 5), sets, vocab_size=vocabulary, tp_group=group
    ).compute()
    return [t.detach() for t in (found.filtered, found.unfiltered, found.entropy)], sparse, dense, metrics


@pytest.mark.parametrize("world", [2, 4])
def test_replay_agrees_on_every_split(world):
    vocabulary = 70
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    sets = RolloutSupport(torch.tensor([0, 69, 35, 36, 5]), torch.tensor([0, 2, 4, 4, 5]))
    targets = torch.tensor([69, 35, 8, 5])
    outputs, sparse, dense, metrics = _replayed(0, 1, logits, vocabulary, sets, targets)
    ranks = run_ranks(world, _replayed, logits, vocabulary, sets, targets)
    for theirs in ranks:
        for mine, other in zip(outputs, theirs[0], strict=True):
            torch.testing.assert_close(other, mine, rtol=1e-6, atol=1e-6)
        assert theirs[3] == pytest.approx(metrics)
    for which, mine in ((1, sparse), (2, dense)):
        joined = torch.cat([theirs[which] for theirs in ranks], 1)
        torch.testing.assert_close(joined[:, :vocabulary], mine, rtol=0, atol=1e-7)


def test_complete_logits_on_every_rank_are_an_error():
    """Case C17: the vocabulary-parallel routine fed with gathered logits gives -4.188329 when nobody checks."""

    def on_rank(rank, world):
        logits = torch.zeros(3, 33)
        targets = torch.zeros(3, dtype=torch.int64)
        errors = []
        for vocab_size in (33, None, 70):
            with pytest.raises(ValueError) as error:
                support_logprobs(logits, targets, SamplingParams(), vocab_size=vocab_size, tp_group=dist.group.WORLD)
            errors.append(str(error.value))
        return errors

    for complete, missing, short in run_ranks(2, on_rank):
        assert "complete logits, not a shard" in complete and "tp_group=None" in complete
        assert "vocab_size is required" in missing
        assert "fewer than vocab_size=70" in short


def test_a_dtensor_that_shards_the_vocabulary_unevenly_agrees_with_whole_logits():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    logits = torch.randn(2, 4, 33, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 33, (2, 4), generator=torch.Generator().manual_seed(1))
    masks = (torch.ones(2, 4), torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]))
    sampling = SamplingParams(1.0, 8, 0.9)

    def on_rank(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        results = []
        for placement in (Shard(2), Replicate()):
            placed = distribute_tensor(logits, mesh, [placement]).requires_grad_()
            found = token_logprobs(placed, ids, *masks, sampling).filtered
            torch.where(found > -torch.inf, found, 0.0).sum().backward()
            assert isinstance(placed.grad, DTensor)
            results.append((found.detach(), placed.grad.full_tensor()))
        with pytest.raises(ValueError, match="not supported"):
            token_logprobs(distribute_tensor(logits, mesh, [Shard(0)]), ids, *masks, sampling)
        return results

    whole = logits.clone().requires_grad_()
    want = token_logprobs(whole, ids, *masks, sampling).filtered
    torch.where(want > -torch.inf, want, 0.0).sum().backward()
    for results in run_ranks(2, on_rank):
        for found, grad in results:
            torch.testing.assert_close(found, want.detach(), rtol=0, atol=1e-6)
            torch.testing.assert_close(grad, whole.grad, rtol=0, atol=1e-6)
