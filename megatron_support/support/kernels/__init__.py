"""Fused device kernels for the passes that plain torch makes one operation at a time.

On a CPU, chunks that stay in the cache make plain torch fast, and nothing here is used. On an accelerator every
operation is a pass over memory: Triton kernels read the logits once for the sums of the forward pass, and read and
write once for the gradient.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor


def usable(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels take these logits ``[T, W]`` and the compute dtype."""
    if logits.device.type == "cpu" or dtype != torch.float32 or logits.stride(1) != 1:
        return False
    return importlib.util.find_spec("triton") is not None
