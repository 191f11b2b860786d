"""ParallelGroups says who and where this rank is."""

import torch.distributed as dist

from megatron_support.distributed.groups import ParallelGroups
from tests.ranks import run_ranks


def test_no_groups_are_one_process():
    groups = ParallelGroups()
    for name in ("tensor", "pipeline", "context", "data", "data_context", "world"):
        assert getattr(groups, name) is None
        assert getattr(groups, f"{name}_size") == 1
        assert getattr(groups, f"{name}_rank") == 0
    assert groups.is_first_stage and groups.is_last_stage and groups.is_main
    assert groups.last_stage_rank == 0


def test_group_of_one_is_none_and_stages_follow_the_pipeline():
    def on_rank(rank, world):
        alone = [dist.new_group([r]) for r in range(world)][rank]
        groups = ParallelGroups(tensor=alone, pipeline=dist.group.WORLD, world=dist.group.WORLD)
        return (
            groups.tensor is None,
            groups.pipeline_size,
            groups.pipeline_rank,
            groups.is_first_stage,
            groups.is_last_stage,
            groups.last_stage_rank,
            groups.is_main,
        )

    assert run_ranks(3, on_rank) == [
        (True, 3, 0, True, False, 2, True),
        (True, 3, 1, False, False, 2, False),
        (True, 3, 2, False, True, 2, False),
    ]
