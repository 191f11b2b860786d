"""Fused device kernels for the passes that plain torch makes one operation at a time.

On a CPU, chunks that stay in the cache make plain torch fast, and nothing here is used. On an accelerator every
operation is a pass over memory, and every look at a result makes the host wait: Triton kernels read the logits once for
the statistics, and read and write once for the gradient, and rows that need more work are found and worked on without
the host. Where a kernel does not compile, plain torch takes over.
"""

from __future__ import annotations

import importlib.util
import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


class KernelFailure(Exception):
    """A kernel could not be compiled or started; from now on :func:`usable` is false."""


class _State:
    failed = False


def usable(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels take these logits ``[T, W]`` and the compute dtype."""
    return not _State.failed and runs_on(logits.device) and dtype == torch.float32 and logits.stride(1) == 1


def runs_on(device: torch.device) -> bool:
    """Whether kernels are for that device at all."""
    return device.type != "cpu" and importlib.util.find_spec("triton") is not None


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any) -> None:
    """Start a kernel on the device that holds its tensors.

    Raises:
        KernelFailure: it cannot be compiled or started. That is logged once; nothing was computed.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](*arguments, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not _State.failed:
            _State.failed = True
            name = getattr(kernel, "__name__", type(kernel).__name__)
            _LOG.warning(
                "the Triton kernel %s cannot be used (%s: %s); plain torch computes the log-probabilities from now on",
                name.lstrip("_"),
                type(error).__name__,
                str(error).strip().partition("\n")[0],
            )
        raise KernelFailure from error
