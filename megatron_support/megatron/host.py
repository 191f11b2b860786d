"""The machine under Megatron-Core: CUDA with NCCL, or the CPU with gloo, behind one call.

Megatron-Core is written for CUDA. Where none is used, :func:`setup_host` installs
:mod:`megatron_support.megatron.cpu_shim`; where a GPU is used it does not. On either it installs
:mod:`megatron_support.megatron.corrections`. :func:`restore_host` takes both back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_support.errors import ConfigurationError
from megatron_support.megatron.corrections import correct_megatron
from megatron_support.megatron.cpu_shim import CPU, install_cpu_shim
from megatron_support.megatron.patches import Patches

# what is missing is the business of the doctor command, not of every import
_IMPORT_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "MimoModelConfig is experimental",
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where this process computes and how it talks to the others."""

    device: torch.device
    backend: Literal["nccl", "gloo"]

    @property
    def uses_gpu(self) -> bool:
        return self.backend == "nccl"


def prepare_import() -> None:
    """Make ``import megatron.core`` work on this machine. Idempotent; runs before the first such import.

    Megatron-Core 0.19 imports a module of Triton kernels for mixture-of-experts stashing on the way to its pipeline
    schedules. Where Triton is missing (any CPU build of torch) that one module is replaced by one whose kernels raise.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-Core asserts it for tensor parallelism
    for message in _IMPORT_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if name in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    spec = importlib.util.find_spec("megatron.core")
    locations = spec.submodule_search_locations if spec is not None else None
    if not any((Path(path) / "transformer/moe/ops/paged_stash.py").exists() for path in locations or ()):
        return
    module = types.ModuleType(name)
    for attribute, value in (
        ("GLOBAL_BLOCK_SIZE", 1024),
        ("paged_stash_copy_kernel", _MissingKernel()),
        ("paged_stash_pop_kernel", _MissingKernel()),
    ):
        setattr(module, attribute, value)
    sys.modules[name] = module


class _MissingKernel:
    def __getitem__(self, grid: Any) -> Any:
        raise ConfigurationError("paged stashing needs Triton, which is not installed; pip install triton")


def setup_host(device: Literal["auto", "cpu", "cuda"] = "auto") -> Host:
    """Choose the device of this process and make Megatron-Core run on it. Idempotent, and cheap when repeated.

    Args:
        device: "auto" takes a GPU where there is one.

    Returns:
        The device (``cuda:LOCAL_RANK`` or ``cpu``) and the backend of torch.distributed.

    Raises:
        ConfigurationError: "cuda" where torch sees no GPU, or fewer GPUs than ranks on this machine.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(f"device must be auto, cpu or cuda, got {device!r}; use one of them")
    gpus = _gpu_count()
    if device == "cuda" and gpus == 0:
        raise ConfigurationError(
            "device must be auto or cpu on this machine, got 'cuda': torch sees no GPU; "
            "use device: cpu, or install a CUDA build of torch and check CUDA_VISIBLE_DEVICES"
        )
    _PATCHES.apply(correct_megatron)
    if device == "cpu" or gpus == 0:
        _PATCHES.apply(install_cpu_shim)
        return Host(device=CPU, backend="gloo")
    local_rank = _environment_int("LOCAL_RANK", 0)
    if local_rank >= gpus:
        raise ConfigurationError(
            f"LOCAL_RANK must be below the {gpus} visible GPUs, got {local_rank}; "
            f"start at most {gpus} ranks on this machine"
        )
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return Host(device=chosen, backend="nccl")


def restore_host() -> None:
    """Undo everything :func:`setup_host` patched, newest first."""
    _PATCHES.undo()


def start_distributed(host: Host, *, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join torch.distributed as torchrun's environment says; alone where there is none. Idempotent.

    Raises:
        ConfigurationError: the environment names several ranks but no meeting point.
    """
    if dist.is_initialized():
        return
    world = _environment_int("WORLD_SIZE", 1)
    device_id = host.device if host.uses_gpu else None
    if world == 1 and "MASTER_ADDR" not in os.environ:
        _start_alone(host, timeout)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"WORLD_SIZE is {world} but {', '.join(missing)} is not set; start with torchrun --nproc-per-node {world}"
        )
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    restart = _environment_int("TORCHELASTIC_RESTART_COUNT", 0)
    if restart and _environment_int("GROUP_WORLD_SIZE", 1) == 1:
        # the launcher keeps one store over restarts (pytorch/pytorch#135712), with addresses of ranks that are gone;
        # launchers on several machines count restarts differently, and need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        store = dist.PrefixStore(f"restart_{restart}", store)
    dist.init_process_group(host.backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)


def _start_alone(host: Host, timeout: timedelta) -> None:
    device_id = host.device if host.uses_gpu else None
    store = dist.HashStore()
    dist.init_process_group(host.backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)


def seed_generators(seed: int) -> None:
    """Seed Megatron's RNG tracker and the device's generator. Megatron's groups must exist."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def stop_distributed() -> None:
    """Leave torch.distributed and forget Megatron's groups. Idempotent."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def running_host(
    device: Literal["auto", "cpu", "cuda"] = "auto", *, timeout: timedelta = timedelta(minutes=30)
) -> Iterator[Host]:
    """A host with torch.distributed up for the length of a ``with`` block.

    Args:
        device: as for :func:`setup_host`.
        timeout: longest wait of one collective for its ranks.
    """
    host = setup_host(device)
    start_distributed(host, timeout=timeout)
    try:
        yield host
    finally:
        stop_distributed()


@contextlib.contextmanager
def running_alone(host: Host) -> Iterator[None]:
    """torch.distributed with this process as its only rank for the length of a ``with`` block.

    Whatever torchrun's environment says: the ranks can meet afterwards (:func:`start_distributed`).
    """
    assert not dist.is_initialized(), "torch.distributed is up already"
    _start_alone(host, timedelta(minutes=30))
    try:
        yield
    finally:
        stop_distributed()


_PATCHES = Patches()


def _gpu_count() -> int:
    if install_cpu_shim in _PATCHES.applied:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigurationError(f"environment variable {name} must be an integer >= 0, got {text!r}; unset it")
    return int(text)
