"""The process groups of one rank, as plain values: code that needs a group takes it as an argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """This rank's groups; None stands for a group of one rank. ``ParallelGroups()`` is a single process.

    A group of size 1 is stored as None as well, so ``is not None`` means "there is somebody to talk to".
    """

    tensor: ProcessGroup | None = None
    """Ranks that share one layer's weights."""
    pipeline: ProcessGroup | None = None
    """Ranks that hold the layers one after the other, in order."""
    context: ProcessGroup | None = None
    """Ranks that share one sequence."""
    data: ProcessGroup | None = None
    """Ranks that hold the same weights and work on different sequences."""
    data_context: ProcessGroup | None = None
    """``data`` x ``context``: ranks whose gradients of one parameter are added up."""
    world: ProcessGroup | None = None
    """All ranks."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "data", "data_context", "world"):
            group = getattr(self, name)
            if group is not None and group.size() == 1:
                object.__setattr__(self, name, None)

    @property
    def tensor_size(self) -> int:
        return _size(self.tensor)

    @property
    def tensor_rank(self) -> int:
        return _rank(self.tensor)

    @property
    def pipeline_size(self) -> int:
        return _size(self.pipeline)

    @property
    def pipeline_rank(self) -> int:
        return _rank(self.pipeline)

    @property
    def context_size(self) -> int:
        return _size(self.context)

    @property
    def context_rank(self) -> int:
        return _rank(self.context)

    @property
    def data_size(self) -> int:
        return _size(self.data)

    @property
    def data_rank(self) -> int:
        return _rank(self.data)

    @property
    def data_context_size(self) -> int:
        return _size(self.data_context)

    @property
    def data_context_rank(self) -> int:
        return _rank(self.data_context)

    @property
    def world_size(self) -> int:
        return _size(self.world)

    @property
    def world_rank(self) -> int:
        return _rank(self.world)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding (of its first model chunk)."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer (of its last model chunk)."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of this pipeline's last stage: the source of a broadcast of what only it knows."""
        if self.pipeline is None:
            return self.world_rank
        return dist.get_process_group_ranks(self.pipeline)[-1]

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all: the one that logs and writes files."""
        return self.world_rank == 0


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
