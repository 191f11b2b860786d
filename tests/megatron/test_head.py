"""The fused head takes hidden states and the right weight, and no logits of a whole microbatch are made."""

from dataclasses import replace

import pytest
import torch

from megatron_support.config.recipe import LogprobConfig, ParallelConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.megatron.head import batch_logprobs, run_chunk, uses_fused_head
from tests.megatron.tiny import TINY, tiny_model, token_batch, tokens
from tests.ranks import run_ranks


def _with_targets(batch):
    following = torch.cat([batch.input_ids[:, 1:], torch.full_like(batch.input_ids[:, :1], -1)], 1).flatten()
    return replace(batch, targets=following, response_mask=following >= 0)


def _fused_and_whole(rank, world, tied, packed):
    model, groups = tiny_model(ParallelConfig(), architecture=TINY.model_copy(update={"tie_embeddings": tied}))
    (chunk,) = model.chunks
    batch = _with_targets(token_batch(tokens(), packed=packed))
    output = run_chunk(chunk, batch, fused=True)
    bare = model.bare_chunks[0]
    assert output.weight is (bare.embedding.word_embeddings.weight if tied else bare.output_layer.weight)
    assert output.tensor.shape[-1] == TINY.hidden_size
    assert "forward" not in vars(bare.output_layer), "the output layer is itself again"
    whole = run_chunk(chunk, batch, fused=False)
    assert whole.weight is None and whole.tensor.shape[-1] == model.padded_vocab_size
    config = LogprobConfig()
    return [
        batch_logprobs(out, batch, model=model, groups=groups, logprobs=config, entropy=True) for out in (output, whole)
    ]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_hidden_states_and_logits_give_the_same(tied, packed):
    def detached(rank, world):
        return [(v.filtered.detach(), v.entropy.detach()) for v in _fused_and_whole(rank, world, tied, packed)]

    ((fused, whole),) = run_ranks(1, detached)
    for a, b in zip(fused, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


def test_the_output_layer_is_restored_after_an_exception():
    def run(rank, world):
        model, _ = tiny_model(ParallelConfig())
        batch = _with_targets(token_batch(tokens(), packed=True))
        handle = model.bare_chunks[0].decoder.register_forward_hook(_fail)
        with pytest.raises(RuntimeError, match="in the decoder"):
            run_chunk(model.chunks[0], batch, fused=True)
        handle.remove()
        return run_chunk(model.chunks[0], batch, fused=False).tensor.shape[-1] == model.padded_vocab_size

    assert run_ranks(1, run) == [True]


def _fail(*_):
    raise RuntimeError("in the decoder")


def test_auto_fuses_where_the_logits_of_a_rank_are_large():
    def run(rank, world):
        model, _ = tiny_model(ParallelConfig())
        rows = (256 << 20) // (4 * model.padded_vocab_size)
        return [uses_fused_head(LogprobConfig(), model, ParallelGroups(), tokens) for tokens in (rows, rows + 1)]

    assert run_ranks(1, run) == [[False, True]]
    assert LogprobConfig(fused_head=True).fused_head is True
