"""The eager core attention against softmax attention written out for one sequence."""

import types

import pytest
import torch

from megatron_support.config.recipe import ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.attention import EagerCoreAttention, packed_parameters
from megatron_support.rollouts.microbatch import context_positions
from tests.megatron.tiny import ready
from tests.ranks import run_ranks

LENGTHS = (8, 4, 12)
TOTAL = sum(LENGTHS)
HEADS, GROUPS, SIZE = 4, 2, 6


def _qkv(total=TOTAL):
    generator = torch.Generator().manual_seed(3)
    shapes = ((total, HEADS, SIZE), (total, GROUPS, SIZE), (total, GROUPS, SIZE))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _written_out(query, key, value):
    """softmax(q k / sqrt(d)) v over the tokens up to each one, head by head."""
    output = torch.empty_like(query)
    for t in range(len(query)):
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = key[: t + 1, group] @ query[t, head] / SIZE**0.5
            output[t, head] = torch.softmax(scores, 0) @ value[: t + 1, group]
    return output.flatten(1)


def _attention(context=1):
    ready(ParallelConfig(context=context))
    config = types.SimpleNamespace(attention_dropout=0.0)
    return EagerCoreAttention(config, 1, None, "self")


def _bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def test_each_packed_sequence_attends_to_itself():
    def on_rank(rank, world):
        query, key, value = _qkv()
        output = _attention()(query, key, value, packed_seq_params=packed_parameters(_bounds(LENGTHS), sum(LENGTHS)))
        expected = [
            _written_out(*parts) for parts in zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True)
        ]
        torch.testing.assert_close(output, torch.cat(expected), rtol=0, atol=1e-12)

    run_ranks(1, on_rank)


def test_rows_of_a_padded_batch_are_separate():
    def on_rank(rank, world):
        rows = [_qkv(6), [x.flip(0) for x in _qkv(6)]]
        query, key, value = (torch.stack(parts, 1) for parts in zip(*rows, strict=True))
        output = _attention()(query, key, value)
        expected = torch.stack([_written_out(*row) for row in rows], 1)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)

    run_ranks(1, on_rank)


def test_tokens_behind_the_last_boundary_are_a_sequence_of_their_own():
    parameters = packed_parameters(_bounds((8, 4)), 24)
    assert parameters.lengths == (8, 4, 12)
    assert parameters.cu_seqlens_q.tolist() == [0, 8, 12, 24]
    assert parameters.max_seqlen_q == 12


@pytest.mark.parametrize("packed", [True, False])
def test_context_parallel_output_and_gradients_are_those_of_one_rank(packed):
    lengths = LENGTHS if packed else (24,)

    def on_rank(rank, world, context):
        leaves = [x.requires_grad_() for x in _qkv()]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        mine = torch.cat(
            [s + context_positions(torch.tensor([n]), context, rank) for s, n in zip(starts, lengths, strict=True)]
        )
        parts = [x[mine] if packed else x[mine].unsqueeze(1) for x in leaves]
        parameters = packed_parameters(_bounds(lengths), sum(lengths)) if packed else None
        output = _attention(context)(*parts, packed_seq_params=parameters)
        (output.sin() * (1 + mine.view(-1, *[1] * (output.dim() - 1)))).sum().backward()
        whole = torch.zeros(sum(lengths), HEADS * SIZE, dtype=torch.float64)
        whole[mine] = output.detach().view(len(mine), -1)
        return whole, [x.grad for x in leaves]

    ((expected, gradients),) = run_ranks(1, on_rank, 1)
    results = run_ranks(2, on_rank, 2)
    torch.testing.assert_close(sum(output for output, _ in results), expected, rtol=0, atol=1e-12)
    for index, gradient in enumerate(gradients):
        torch.testing.assert_close(sum(g[index] for _, g in results), gradient, rtol=0, atol=1e-12)


def test_context_shards_are_the_first_and_the_last_chunks():
    # 12 tokens on 3 ranks: six chunks of two; rank 0 holds chunks 0 and 5, rank 2 holds chunks 2 and 3
    assert context_positions(torch.tensor([12]), 3, 0).tolist() == [0, 1, 10, 11]
    assert context_positions(torch.tensor([12]), 3, 2).tolist() == [4, 5, 6, 7]


def test_unpadded_length_under_context_parallelism_is_refused():
    with pytest.raises(ConfigurationError, match=r"multiple of 4, got \[6\]; pad"):
        context_positions(torch.tensor([6]), 2, 0)
