"""Where the time of a step goes: timers around the parts of the package and of Megatron-Core, each counted alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

import megatron_support.loss.actor as actor_loss_module
from megatron_support.megatron import actor_step, forward, loss_function, minibatch, step_metrics
from megatron_support.megatron.actor_step import ActorStep

FORWARD, BACKWARD, OPTIMIZER, SCHEDULE = "model forward", "model backward", "optimizer", "Megatron's schedule"
CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD = "head and cross-entropy", "their backward"
PLANNING, PACKING, LOGPROBS = "planning", "packing", "head and log-probabilities"
LOSS, METRICS, COLLECTIVES, NORM, REST = "loss", "metrics", "counts and collectives", "gradient check", "other"

MODEL = (FORWARD, BACKWARD, OPTIMIZER, SCHEDULE)
"""What a training step without this package spends, too."""
BOOKKEEPING = (PLANNING, PACKING, LOSS, METRICS, COLLECTIVES, NORM, REST)


class Phases:
    """Exclusive times: a phase inside another stops the outer one's clock.

    Args:
        clock: seconds. ``time.process_time`` leaves out what other processes take; between ranks
            ``time.perf_counter`` counts waiting, too.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        """Collective calls, and """
        self.bytes: Counter[str] = Counter()
        """what was handed to them."""
        self._clock = clock
        self._stack: list[str] = []
        self._since = clock()

    def _charge(self) -> None:
        now = self._clock()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def become(self, name: str) -> None:
        """Rename the innermost phase from here on."""
        self._charge()
        self._stack[-1] = name

    def switch_at_gradient(self, tensor: Tensor, name: str) -> None:
        """In a backward pass: ``name`` begins where the gradient of ``tensor`` is complete."""
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.become(name))

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A collective, whose calls and bytes go to the innermost phase; its last tensor argument is what it sends."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._stack:
                sent = [value for value in args if isinstance(value, Tensor)][-1]
                self.calls[self._stack[-1]] += 1
                self.bytes[self._stack[-1]] += sent.numel() * sent.element_size()
            return function(*args, **kwargs)

        return run

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@contextmanager
def watching(phases: Phases, step: ActorStep) -> Iterator[None]:
    """Charge everything that a step does to a phase for the length of a block."""
    with ExitStack() as stack:

        def watch(owner: Any, attribute: str, name: str) -> None:
            stack.enter_context(patch.object(owner, attribute, phases.timed(getattr(owner, attribute), name)))

        for name in ("all_reduce", "all_gather", "broadcast"):
            stack.enter_context(patch.object(dist, name, phases.counted(getattr(dist, name))))
        watch(step, "step", REST)
        for module in (actor_step, forward):
            watch(module, "prepare_minibatch", PACKING)
            watch(module, "run_schedule", SCHEDULE)
            watch(module, "gather_logprobs", COLLECTIVES)
        watch(minibatch, "plan_microbatches", PLANNING)
        watch(minibatch, "global_counts", COLLECTIVES)
        for module in (forward, loss_function):
            _watch_model(stack, phases, module)
        watch(loss_function, "actor_loss", LOSS)
        watch(loss_function, "find_faults", LOSS)
        watch(actor_loss_module, "_diagnostics", METRICS)
        watch(actor_step, "minibatch_outcome", METRICS)
        watch(actor_step, "check_same_rollouts", COLLECTIVES)
        watch(step_metrics, "reduce_metrics", COLLECTIVES)
        watch(step, "_grad_norm", NORM)
        watch(step.optimizer, "step", OPTIMIZER)
        watch(step.optimizer, "zero_grad", OPTIMIZER)
        for chunk in step.model.chunks:
            watch(chunk, "zero_grad_buffer", OPTIMIZER)
        watch(schedules, "backward_step", LOSS)  # until the gradient reaches the log-probabilities
        yield


def _watch_model(stack: ExitStack, phases: Phases, module: Any) -> None:
    """Forward of the model and of the log-probabilities, and where their backward passes begin."""
    run_chunk = phases.timed(module.run_chunk, FORWARD)
    batch_logprobs = phases.timed(module.batch_logprobs, LOGPROBS)

    def hooked_chunk(*args: Any, **kwargs: Any) -> Any:
        output = run_chunk(*args, **kwargs)
        phases.switch_at_gradient(output.tensor, BACKWARD)
        return output

    def hooked_logprobs(*args: Any, **kwargs: Any) -> Any:
        values = batch_logprobs(*args, **kwargs)
        if torch.is_grad_enabled():
            phases.switch_at_gradient(values.filtered, LOGPROBS)
        return values

    stack.enter_context(patch.object(module, "run_chunk", hooked_chunk))
    stack.enter_context(patch.object(module, "batch_logprobs", hooked_logprobs))
