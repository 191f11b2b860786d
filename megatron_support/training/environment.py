"""Where a run ran: versions, devices, layout. Written into the run folder for the report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_support import __version__
from megatron_support.distributed.groups import ParallelGroups

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "triton", "numpy", "pydantic")
_VARIABLES = ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "NVTE_")


def describe_environment(groups: ParallelGroups, device: torch.device) -> dict[str, Any]:
    """Plain values about this rank's machine, and where every rank is. Collective.

    Args:
        groups: the ranks' layout.
        device: the one that this rank computes on.
    """
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "megatron-support": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": device_name(device),
        "threads per rank": torch.get_num_threads(),
        "ranks": groups.world_size,
        "machines": _machines(groups),
        "layout": {
            "tensor": groups.tensor_size,
            "pipeline": groups.pipeline_size,
            "context": groups.context_size,
            "data": groups.data_size,
        },
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }


def _machines(groups: ParallelGroups) -> dict[str, str]:
    """Host names with their ranks, as ``{"node3": "0, 1"}``."""
    names = [platform.node()] * groups.world_size
    if groups.world is not None:
        dist.all_gather_object(names, platform.node(), group=groups.world)
    return {
        host: ", ".join(str(rank) for rank, name in enumerate(names) if name == host) for host in dict.fromkeys(names)
    }


def device_name(device: torch.device) -> str:
    """The model of the accelerator, or of the machine's processor."""
    if device.type != "cpu":
        return torch.get_device_module(device).get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
