"""The machine under Megatron-Core: CUDA with NCCL, or the CPU with gloo, behind one call.

Megatron-Core is written for CUDA. Where none is used, :func:`setup_host` installs a shim; where a GPU is used it does
not. The shim patches, and :func:`restore_host` puts back:

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

Independent of the device :func:`setup_host` also corrects Megatron-Core itself:

* ``WrappedTorchNorm`` refuses sequence parallelism. A norm over a sequence shard is right as long as its parameters are
  tagged, so that ``finalize_model_grads`` sums their gradients over the tensor-parallel group. The tag is added.
* ``DistributedOptimizer`` cannot save or load the per-parameter ``step`` of torch's own AdamW, which is what it wraps
  where neither Transformer Engine nor Apex is there. ``step`` is left out of sharded state and kept over a load.
* The router of experts in 0.16 asks whether ``te_general_gemm`` is None, and without Transformer Engine the name does
  not exist. It becomes None.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.overrides import TorchFunctionMode

from megatron_support.errors import ConfigurationError
from megatron_support.megatron.file_queue import FileQueue

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
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
    _PATCHES.apply(_correct_megatron)
    if device == "cpu" or gpus == 0:
        _PATCHES.apply(_install_cpu_shim)
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


class _Patches:
    """Attributes set on foreign objects, with what they replaced."""

    def __init__(self) -> None:
        self.applied: list[Callable[[_Patches], None]] = []
        self._undo: list[Callable[[], Any]] = []

    def apply(self, step: Callable[[_Patches], None]) -> None:
        if step not in self.applied:
            step(self)
            self.applied.append(step)

    def set(self, target: Any, name: str, value: Any) -> None:
        missing = name not in vars(target)
        original = vars(target).get(name)  # from vars: a staticmethod stays one
        setattr(target, name, value)
        self._undo.append(lambda: delattr(target, name) if missing else setattr(target, name, original))

    def on_undo(self, action: Callable[[], Any]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.applied.clear()


_PATCHES = _Patches()


def _gpu_count() -> int:
    if _install_cpu_shim in _PATCHES.applied:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigurationError(f"environment variable {name} must be an integer >= 0, got {text!r}; unset it")
    return int(text)


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


def _install_cpu_shim(patches: _Patches) -> None:
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


def _correct_megatron(patches: _Patches) -> None:
    _allow_sequence_parallel_norm(patches)
    _checkpoint_adam_step(patches)
    _let_router_work_without_transformer_engine(patches)


def _let_router_work_without_transformer_engine(patches: _Patches) -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        patches.set(moe_utils, "te_general_gemm", None)


def _allow_sequence_parallel_norm(patches: _Patches) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        without = copy.copy(config)
        without.sequence_parallel = False
        module = original(cls, without, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    patches.set(WrappedTorchNorm, "__new__", new)


def _checkpoint_adam_step(patches: _Patches) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    get = DistributedOptimizer._get_main_param_and_optimizer_states
    put = DistributedOptimizer._set_main_param_and_optimizer_states
    state_dict = DistributedOptimizer.state_dict
    load_state_dict = DistributedOptimizer.load_state_dict

    def get_without_step(self: Any, parameter: Any) -> dict[str, Any]:
        return {name: value for name, value in get(self, parameter).items() if name != "step"}

    @torch.no_grad()
    def put_beside_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, index = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        step = state.pop("step", None)
        put(self, parameter, tensors)
        if step is not None:
            state["step"] = step

    def state_dict_of_started(self: Any) -> dict[str, Any]:
        _start_adam(self.optimizer)
        return state_dict(self)

    def load_with_own_steps(self: Any, state: dict[str, Any]) -> None:
        load_state_dict(self, state)
        # it hands every parameter the same step tensor, which then counts one update per parameter
        for values in self.optimizer.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"] = values["step"].clone()

    patches.set(DistributedOptimizer, "_get_main_param_and_optimizer_states", get_without_step)
    patches.set(DistributedOptimizer, "_set_main_param_and_optimizer_states", put_beside_step)
    patches.set(DistributedOptimizer, "state_dict", state_dict_of_started)
    patches.set(DistributedOptimizer, "load_state_dict", load_with_own_steps)


def _start_adam(optimizer: Any) -> None:
    """Give a fresh torch AdamW the zero state that its first step would make. Fused Adams keep ``step`` per group."""
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter].update(
                    step=torch.zeros(()), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
                )


def _give_expert_dispatch_its_counts(patches: _Patches) -> None:
    """The dispatcher turns token counts into NumPy arrays on their way off a GPU; on the CPU they stayed tensors."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    patches.set(token_dispatcher, "maybe_move_tensor_to_cpu", on_host)


def _use_file_checkpoint_queue(patches: _Patches) -> None:
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
