"""One call of Megatron's forward-backward function, for any number of model chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_support.megatron.parts import ModelParts
from megatron_support.types import TokenBatch

ForwardStep = Callable[[Iterator[TokenBatch], Any], tuple[Any, Callable[..., Any]]]


class Microbatches(Protocol):
    """What a schedule needs of a minibatch; :class:`megatron_support.megatron.minibatch.Minibatch` is one."""

    @property
    def microbatches(self) -> Sequence[TokenBatch]: ...

    @property
    def micro_batch_size(self) -> int: ...

    @property
    def seq_length(self) -> int: ...


def run_schedule(
    model: ModelParts, minibatch: Microbatches, forward_step: ForwardStep, *, forward_only: bool
) -> list[Any]:
    """Run all microbatches through the pipeline.

    Args:
        model: this rank's chunks.
        minibatch: microbatches of one shape, e.g. from :func:`prepare_minibatch`.
        forward_step: ``(iterator, chunk) -> (output, loss function)``. In a forward-only pass the loss function is
            called with ``non_loss_data=True`` and its result is collected as it is.
        forward_only: no backward pass.

    Returns:
        What the loss function gave for each microbatch on the last pipeline stage, else an empty list. With an
        interleaved schedule the order is the schedule's, so results must identify themselves.
    """
    chunks = list(model.chunks)
    iterators = [iter(minibatch.microbatches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(minibatch.microbatches),
        seq_length=minibatch.seq_length,
        micro_batch_size=minibatch.micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
