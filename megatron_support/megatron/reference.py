"""The reference policy: a frozen host copy of weights that takes the trainer's place for one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class HostWeights:
    """A copy of a model's parameters and buffers in host memory, pinned where the model is on an accelerator."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._tensors = [_host_copy(tensor) for tensor in _tensors(chunks)]

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @torch.no_grad()
    def copy_to(self, chunks: Sequence[nn.Module]) -> None:
        """Write the copy into the model, in place: parameters may be views of Megatron's parameter buffers."""
        for target, source in zip(_tensors(chunks), self._tensors, strict=True):
            target.copy_(source, non_blocking=True)

    @contextmanager
    def swapped_into(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Run a block with these weights in the model; the model's own return afterwards, also after an exception.

        Tensors change places one by one, so this needs the memory of the largest of them and no second copy. Inside the
        block this object holds the model's weights: it cannot be entered twice.
        """
        pairs = list(zip(_tensors(chunks), self._tensors, strict=True))
        swapped = 0
        try:
            for target, source in pairs:
                _exchange(target, source)
                swapped += 1
            yield
        finally:
            for target, source in pairs[:swapped]:
                _exchange(target, source)


@torch.no_grad()
def _exchange(target: Tensor, source: Tensor) -> None:
    current = target.clone()
    target.copy_(source)
    source.copy_(current)


def _tensors(chunks: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers that a forward pass reads, in a fixed order.

    Megatron's DistributedDataParallel has an attribute named ``buffers`` (its gradient buffers), hence the class's own.
    """
    return [t.data for chunk in chunks for t in (*nn.Module.parameters(chunk), *nn.Module.buffers(chunk))]


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type != "cpu")
    return copy.copy_(tensor)
