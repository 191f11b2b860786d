"""Megatron's process groups for a recipe's layout."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_support.config.layout import validate_layout
from megatron_support.config.recipe import ParallelConfig
from megatron_support.distributed.groups import ParallelGroups


def initialize_parallel(
    parallel: ParallelConfig, world_size: int | None = None, *, timeout: timedelta = timedelta(minutes=30)
) -> ParallelGroups:
    """Make Megatron's process groups for a layout. Collective; torch.distributed must be up.

    Args:
        parallel: the layout.
        world_size: number of ranks; None for what torch.distributed says.
        timeout: longest wait of one collective of these groups.

    Returns:
        This rank's groups.

    Raises:
        ConfigurationError: the layout does not divide the world.
        RuntimeError: Megatron already has groups of another layout.
    """
    world_size = dist.get_world_size() if world_size is None else world_size
    validate_layout(None, parallel, world_size)
    if parallel_state.model_parallel_is_initialized():
        _require_same_layout(parallel)
    else:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
        )
    return current_groups()


def current_groups() -> ParallelGroups:
    """The groups Megatron has made, whoever asked for them."""
    return ParallelGroups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
        world=dist.group.WORLD,
    )


def destroy_parallel() -> None:
    """Leave Megatron's groups, so that another layout can be made. Collective; torch.distributed stays up."""
    made = getattr(parallel_state, "_global_process_group_list", None) or ()  # the list that Megatron sets timeouts by
    dist.barrier()  # a slower rank may still be talking in one of them
    for group in {id(group): group for group in made if group is not None}.values():
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _require_same_layout(parallel: ParallelConfig) -> None:
    have = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    want = (parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context, parallel.expert)
    if have != want:
        raise RuntimeError(
            "Megatron already has process groups with (tensor, pipeline, virtual_pipeline, context, expert) = "
            f"{have}, asked for {want}; call destroy_parallel() first"
        )
