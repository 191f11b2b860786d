"""What a disk that is full or cannot be written means for a run: its end, or a warning."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_support.config.recipe import Recipe
from megatron_support.distributed.errors import raise_together
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import CheckpointError


class Disk:
    """Writes of the first rank that fail on all ranks, or on none and are spoken of. Every method is collective.

    Args:
        recipe: ``checkpoint.on_write_error`` decides.
        groups: the ranks' layout.
        device: one that the groups' backend works on.
        say: how the first rank tells of it; others stay silent.
    """

    def __init__(
        self, recipe: Recipe, groups: ParallelGroups, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._raises = recipe.checkpoint.on_write_error == "raise"
        self._groups, self._device, self._say = groups, device, say

    @property
    def is_main(self) -> bool:
        return self._groups.is_main

    def write(self, action: Callable[[], None]) -> None:
        """Run an action on the first rank.

        Raises:
            CheckpointError: it raised OSError, and ``checkpoint.on_write_error`` is raise.
        """
        self.tolerate(lambda: self._together(action))

    def tolerate(self, action: Callable[[], None]) -> None:
        """Run an action on every rank, which raises CheckpointError on all or on none."""
        try:
            action()
        except CheckpointError as error:
            if self._raises:
                raise
            self._say(f"warning: {error}; the run goes on")

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank what one has found."""
        raise_together(error, self._groups.world, self._device)

    def agreed(self, value: bool) -> bool:
        """The first rank's value."""
        if self._groups.world is None:
            return value
        box = torch.tensor([int(value)], device=self._device)
        torch.distributed.broadcast(box, src=0, group=self._groups.world)
        return bool(box.item())

    def _together(self, action: Callable[[], None]) -> None:
        error = None
        if self.is_main:
            try:
                action()
            except OSError as failed:
                error = CheckpointError(
                    f"{failed.filename or 'the run folder'}: cannot be written ({failed.strerror}); free space on the "
                    "disk, or choose another logging.run_dir"
                )
        self.raise_together(error)
