"""What build_model refuses and pads, precision of the logits, evaluation mode, hooks."""

import pytest
import torch
from megatron.core.distributed import finalize_model_grads

from megatron_support.config.recipe import ModelConfig, ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.model import build_model, padded_vocab_size, resolve_implementation, wrap_ddp
from megatron_support.megatron.optimizer import adam_implementation
from megatron_support.megatron.parts import evaluating, model_forward
from megatron_support.megatron.rope import rotary_frequencies
from tests.megatron.tiny import TINY, ready, tiny_model, token_batch, tokens
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("vocab", "tensor", "padded"), [(100, 1, 128), (100, 8, 128), (129, 2, 256), (49152, 3, 49152), (100, 3, 384)]
)
def test_vocabulary_is_padded_to_a_multiple_that_hardly_depends_on_the_layout(vocab, tensor, padded):
    assert padded_vocab_size(vocab, tensor) == padded


def test_rank_whose_rows_are_all_padding_has_zeros():
    architecture = TINY.model_copy(update={"num_attention_heads": 3, "num_query_groups": 3, "hidden_size": 36})

    def on_rank(rank, world):
        model, _ = tiny_model(ParallelConfig(tensor=3), architecture=architecture)
        return model.bare_chunks[0].embedding.word_embeddings.weight.detach()

    first, *others = run_ranks(3, on_rank)
    assert first.shape == (128, 36) and first[:100].abs().min() > 0
    assert all(bool((rows == 0).all()) and rows.shape == (128, 36) for rows in others)


def test_bf16_logits_stay_bf16_and_are_as_close_as_bf16_is():
    def on_rank(rank, world, dtype):
        model, groups = tiny_model(dtype=dtype)
        with torch.no_grad():
            return model_forward(model.chunks[0], token_batch(tokens(), packed=True, groups=groups))

    exact = run_ranks(1, on_rank, "float32")[0][:, :100]
    low = run_ranks(1, on_rank, "bfloat16")[0][:, :100]
    assert low.dtype == torch.bfloat16 and low.shape == (24, 100)
    # the last product alone: hidden states of norm sqrt(32) times rows of norm 0.02 sqrt(32), rounded to 8 bits
    assert (low.float() - exact).abs().max() < 4 * 2**-8 * 0.02 * 32
    assert not torch.equal(low.float(), exact)


def test_evaluating_returns_each_mode_also_after_an_exception():
    def on_rank(rank, world):
        model, _ = tiny_model()
        model = wrap_ddp(model)
        inner = model.bare_chunks[0].decoder
        with pytest.raises(KeyError), evaluating(model):
            during = inner.training
            raise KeyError
        return during, inner.training

    assert run_ranks(1, on_rank) == [(False, True)]


def test_wrapping_sets_the_hooks_of_the_schedule():
    def on_rank(rank, world, parallel):
        model, _ = tiny_model(parallel, calculate_per_token_loss=True)
        bare, model = model, wrap_ddp(model)
        assert [a is b for a, b in zip(bare.bare_chunks, model.bare_chunks, strict=True)]
        hooks = model.config.no_sync_func
        return (
            model.config.finalize_model_grads_func is finalize_model_grads,
            len(hooks) if isinstance(hooks, list) else 1,
            model.config.calculate_per_token_loss,
            all(chunk.config is model.config for chunk in model.bare_chunks),
        )

    assert run_ranks(1, on_rank, ParallelConfig())[0] == (True, 1, True, True)
    assert run_ranks(2, on_rank, ParallelConfig(pipeline=2, virtual_pipeline=2))[0] == (True, 2, True, True)


def test_interleaving_uses_the_point_to_point_calls_that_are_right():
    def on_rank(rank, world):
        config = tiny_model(ParallelConfig(pipeline=2, virtual_pipeline=2))[0].config
        return config.overlap_p2p_comm, config.batch_p2p_comm

    assert run_ranks(2, on_rank)[0] == (True, False)


def test_interleaving_with_the_other_point_to_point_calls_is_refused():
    def on_rank(rank, world):
        with pytest.raises(ConfigurationError, match=r"batch_p2p_comm must be False with virtual_pipeline, got True"):
            tiny_model(ParallelConfig(pipeline=2, virtual_pipeline=2), overrides={"batch_p2p_comm": True})

    run_ranks(2, on_rank)


def test_impossible_layout_is_refused_on_every_rank():
    def on_rank(rank, world):
        parallel = ParallelConfig(pipeline=2)
        groups = ready(parallel)
        config = ModelConfig(architecture=TINY.model_copy(update={"num_layers": 3}))
        with pytest.raises(ConfigurationError, match=r"parallel.pipeline must divide .*num_layers 3"):
            build_model(config, parallel, groups, seed=0)

    run_ranks(2, on_rank)


def test_unknown_override_is_refused():
    def on_rank(rank, world):
        with pytest.raises(ConfigurationError, match=r"fields of TransformerConfig, got recompute_granularty"):
            tiny_model(overrides={"recompute_granularty": "full"})

    run_ranks(1, on_rank)


def test_dropout_in_local_attention_is_refused():
    def on_rank(rank, world):
        with pytest.raises(ConfigurationError, match=r"attention_dropout must be 0 with local layers, got 0.1"):
            tiny_model(overrides={"attention_dropout": 0.1})

    run_ranks(1, on_rank)


def test_transformer_engine_on_the_cpu_is_refused():
    assert resolve_implementation("auto", torch.device("cpu")) == "local"
    assert resolve_implementation("local", torch.device("cpu")) == "local"
    with pytest.raises(ConfigurationError, match="got 'transformer_engine' but no GPU is used; use local"):
        resolve_implementation("transformer_engine", torch.device("cpu"))


def test_adam_is_one_of_the_three():
    assert adam_implementation() in ("torch", "apex", "transformer_engine")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, r"must have rope_type llama3 and the numbers factor, .*got .*'yarn'"),
        ({"rope_type": "llama3", "factor": 2.0}, r"must have rope_type llama3 and the numbers factor, low_freq_factor"),
    ],
)
def test_rope_scaling_that_is_not_llama3_is_refused(scaling, message):
    with pytest.raises(ConfigurationError, match=message):
        rotary_frequencies(10000.0, 8, scaling)


def test_llama3_scaling_by_hand():
    """Base 100, size 4: frequencies 1 and 0.1, wavelengths 6.28 and 62.8. Context 63, low 1, high 4: c / w is 10.03,
    past 4, so the first stays; 1.0027 for the second, s = 0.0027 / 3 = 0.00089, so it is nearly divided by 8."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 63,
    }
    smooth = (63 * 0.1 / 6.283185307 - 1) / 3
    expected = torch.tensor([1.0, (1 - smooth) * 0.1 / 8 + smooth * 0.1])
    torch.testing.assert_close(rotary_frequencies(100.0, 4, scaling), expected)
    torch.testing.assert_close(rotary_frequencies(100.0, 4, None), torch.tensor([1.0, 0.1]))
    assert expected[1] == pytest.approx(0.0125, rel=0.01)
