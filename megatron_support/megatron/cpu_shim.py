"""Megatron-Core without CUDA: what it calls of ``torch.cuda`` goes to the CPU.

Patched are:

=============================================  ======================================================================
what                                           what it does instead
=============================================  ======================================================================
``torch.cuda.is_available``                    False, also where a GPU is present but ``device: cpu`` was asked for
``torch.cuda.current_device``                  the CPU device, so ``device=torch.cuda.current_device()`` works
``torch.cuda.synchronize``, ``empty_cache``    nothing
``torch.cuda.manual_seed``, ``get_rng_state``  the CPU generator (Megatron's RNG tracker forks it)
``...random._set_cuda_rng_state``              the CPU generator; the tracker's warning about it is silenced
``torch.cuda.Stream``, ``Event``, ``stream``,  objects that do nothing
``current_stream``, ``default_stream``
``torch.cuda.nvtx.range_push``, ``range_pop``  nothing
``maybe_move_tensor_to_cpu``                   counts of the expert dispatcher become NumPy arrays, as they do off a GPU
tensor factories, ``.to``, ``.cuda()``         a torch function mode sends device "cuda" to the CPU and drops pinning
``Tensor.type()``                              ``torch.cuda.FloatTensor``: Megatron's optimizers compare with it
=============================================  ======================================================================

``dist_checkpointing`` moreover starts a ``spawn`` manager process to hold one results queue, which imports ``__main__``
again (5 s) and outlives a killed rank. On the CPU it gets a queue in an unlinked file, which a forked writer shares.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_support.megatron.file_queue import FileQueue
from megatron_support.megatron.patches import Patches

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class _CudaToCpu(TorchFunctionMode):
    """Sends device "cuda" to the CPU in every torch call of this thread."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not kwargs:
            if func not in _DEVICE_METHODS:  # nearly every call: this runs before each of them
                return func(*args)
            kwargs = {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


_DEVICE_METHODS = frozenset((torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type, torch.Tensor.to))
"""What can name a device, or say where a tensor is, without a keyword."""


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _Inert:
    """A stream or event that does nothing; elapsed times are 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: _Inert | None = None) -> _Inert:
        return _Inert() if event is None else event

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *args, **kwargs: 0.0


def install_cpu_shim(patches: Patches) -> None:
    """Put the shim in place."""
    import megatron.core.tensor_parallel.random as megatron_random

    cuda = torch.cuda
    nothing = lambda *args, **kwargs: None
    patches.set(cuda, "is_available", lambda: False)
    patches.set(cuda, "current_device", lambda: CPU)
    patches.set(cuda, "synchronize", nothing)
    patches.set(cuda, "empty_cache", nothing)
    patches.set(cuda, "manual_seed", torch.manual_seed)
    for module in (cuda, cuda.random):
        patches.set(module, "get_rng_state", lambda device=None: torch.get_rng_state())
    patches.set(
        megatron_random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    )
    patches.set(cuda, "Stream", _Inert)
    patches.set(cuda, "Event", _Inert)
    patches.set(cuda, "current_stream", lambda *args, **kwargs: _Inert())
    patches.set(cuda, "default_stream", lambda *args, **kwargs: _Inert())
    patches.set(cuda, "stream", lambda stream: contextlib.nullcontext())
    patches.set(cuda.nvtx, "range_push", nothing)
    patches.set(cuda.nvtx, "range_pop", nothing)
    # the tracker warns whenever the CPU generator moves inside its fork, which here is the point
    random_logger = logging.getLogger(megatron_random.__name__)
    level = random_logger.level
    random_logger.setLevel(logging.ERROR)
    patches.on_undo(lambda: random_logger.setLevel(level))
    _use_file_checkpoint_queue(patches)
    _give_expert_dispatch_its_counts(patches)
    mode = _CudaToCpu()
    mode.__enter__()
    patches.on_undo(lambda: mode.__exit__(None, None, None))
    logger.debug("CPU host: Megatron-Core's CUDA calls go to the CPU")


def _give_expert_dispatch_its_counts(patches: Patches) -> None:
    """The dispatcher turns token counts into NumPy arrays on their way off a GPU; on the CPU they stayed tensors."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    patches.set(token_dispatcher, "maybe_move_tensor_to_cpu", on_host)


def _use_file_checkpoint_queue(patches: Patches) -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    queues: dict[int, FileQueue] = {}

    def own_queue(*args: Any, **kwargs: Any) -> FileQueue:
        """Of this process: ranks may have been forked after the patch."""
        pid = os.getpid()
        if pid not in queues:
            queues[pid] = FileQueue()
        return queues[pid]

    for name in ("_get_write_results_queue", "get_write_results_queue"):  # the name differs between releases
        if hasattr(filesystem_async, name):
            patches.set(filesystem_async, name, own_queue)
