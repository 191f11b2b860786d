"""Impossible layouts are refused before anything starts, naming field, value and remedy."""

import pytest

from megatron_support.config.layout import validate_layout
from megatron_support.config.recipe import ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.parallel import destroy_parallel, initialize_parallel
from tests.megatron.tiny import TINY
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("changes", "parallel", "world", "message"),
    [
        (
            {},
            {"tensor": 2, "pipeline": 2},
            6,
            r"2 x 2 x 1 = 4 must divide the number of ranks, got 6; start a multiple of 4",
        ),
        ({}, {"tensor": 2, "context": 2}, 2, r"2 x 1 x 2 = 4 must divide the number of ranks, got 2"),
        (
            {"num_attention_heads": 6, "num_query_groups": 6, "hidden_size": 36},
            {"tensor": 4},
            4,
            r"parallel.tensor must divide model.architecture.num_attention_heads 6, got 4; .*: \[1, 2, 3\]",
        ),
        ({}, {"tensor": 4}, 4, r"must divide model.architecture.num_query_groups 2, got 4; .*: \[1, 2\]"),
        ({"ffn_hidden_size": 33}, {"tensor": 2}, 2, r"must divide model.architecture.ffn_hidden_size 33, got 2"),
        ({}, {"pipeline": 3}, 3, r"parallel.pipeline must divide .*num_layers 4, got 3; use one of \[1, 2, 4\]"),
        (
            {"num_layers": 8},
            {"pipeline": 2, "virtual_pipeline": 3},
            2,
            r"virtual_pipeline must divide num_layers / pipeline = 8 / 2 = 4, got 3; use one of \[2, 4\] or null",
        ),
        (
            {},
            {"recompute": {"type": "full", "num_layers": 3}},
            1,
            r"recompute.num_layers must divide the 4 layers of a model chunk with method uniform, got 3; .*\[1, 2, 4\]",
        ),
        (
            {"num_layers": 8},
            {"pipeline": 2, "virtual_pipeline": 2, "recompute": {"type": "full", "method": "block", "num_layers": 3}},
            2,
            r"recompute.num_layers must be at most the 2 layers of a model chunk, got 3; lower it",
        ),
        ({"hidden_size": 34}, {}, 1, r"hidden_size must be a multiple of num_attention_heads 4 .*, got 34"),
        ({"head_dim": 7}, {}, 1, r"head_dim must be even for rotary embeddings, got 7"),
        ({"num_query_groups": 3}, {}, 1, r"num_query_groups must divide num_attention_heads 4, got 3; .*\[1, 2, 4\]"),
    ],
)
def test_impossible_layout(changes, parallel, world, message):
    with pytest.raises(ConfigurationError, match=message):
        validate_layout(TINY.model_copy(update=changes), ParallelConfig(**parallel), world)


def test_all_errors_come_at_once():
    with pytest.raises(ConfigurationError) as caught:
        validate_layout(TINY.model_copy(update={"num_layers": 5}), ParallelConfig(tensor=4, pipeline=2), 6)
    assert len(str(caught.value).splitlines()) == 3  # ranks, query groups, layers


def test_possible_layouts_pass():
    validate_layout(TINY, ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, context=3), 24)
    validate_layout(None, ParallelConfig(tensor=2), 4)


def test_groups_follow_the_layout_and_another_layout_needs_destroying_first():
    def on_rank(rank, world):
        groups = initialize_parallel(ParallelConfig(tensor=2))
        assert initialize_parallel(ParallelConfig(tensor=2)) == groups
        with pytest.raises(RuntimeError, match="destroy_parallel"):
            initialize_parallel(ParallelConfig(pipeline=2))
        destroy_parallel()
        other = initialize_parallel(ParallelConfig(pipeline=2))
        sizes = lambda g: (
            g.tensor_size,
            g.pipeline_size,
            g.context_size,
            g.data_size,
            g.data_context_size,
            g.world_size,
        )
        return sizes(groups), (groups.tensor_rank, groups.data_rank), sizes(other), other.pipeline_rank

    # ranks of one tensor-parallel group are neighbours; pipeline stages are far apart
    expected = [((2, 1, 1, 2, 2, 4), (r % 2, r // 2), (1, 2, 1, 2, 2, 4), r // 2) for r in range(4)]
    assert run_ranks(4, on_rank) == expected


def test_context_ranks_share_gradients_with_data_ranks():
    def on_rank(rank, world):
        groups = initialize_parallel(ParallelConfig(context=2))
        return groups.data_size, groups.data_context_size, groups.context_rank, groups.data_rank

    assert run_ranks(4, on_rank) == [(2, 4, r % 2, r // 2) for r in range(4)]
