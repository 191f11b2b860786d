"""The host: device choice, the CPU shim and its removal, torch.distributed with and without torchrun."""

import importlib.machinery
import importlib.util
import os
import sys

import pytest
import torch
import torch.distributed as dist

from megatron_support.config.recipe import ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron import host as host_module
from megatron_support.megatron.host import (
    prepare_import,
    restore_host,
    running_host,
    setup_host,
    start_distributed,
    stop_distributed,
)
from tests.megatron.tiny import tiny_model
from tests.ranks import run_ranks


def test_cpu_host_sends_cuda_calls_to_the_cpu():
    def on_rank(rank, world):
        host = setup_host("cpu")
        made = torch.zeros(2, device="cuda", pin_memory=True)
        moved = made.cuda().to("cuda:0").to(device="cuda")
        here = torch.ones(1, device=torch.cuda.current_device())
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.Event(enable_timing=True).record()
        return host.device.type, host.backend, host.uses_gpu, made.device.type, moved.device.type, here.device.type

    assert run_ranks(1, on_rank) == [("cpu", "gloo", False, "cpu", "cpu", "cpu")]


def test_setting_up_twice_patches_once_and_restoring_puts_everything_back():
    def on_rank(rank, world):
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.tensor_parallel import random as megatron_random
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        def state():
            return (
                torch.cuda.current_device,
                torch.cuda.get_rng_state,
                torch.cuda.is_available,
                megatron_random._set_cuda_rng_state,
                vars(WrappedTorchNorm)["__new__"],
                DistributedOptimizer.load_state_dict,
                torch.zeros(1).type(),
            )

        restore_host()  # another test may have left its process patched
        before = state()
        first = setup_host("cpu")
        patched = state()
        second = setup_host("auto")
        again = state()
        restore_host()
        return (
            first == second,
            patched == again,
            not any(a is b for a, b in zip(before, patched, strict=True)),
            before == state(),
        )

    assert run_ranks(1, on_rank) == [(True, True, True, True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused_with_the_remedy():
    with pytest.raises(ConfigurationError, match=r"got 'cuda': torch sees no GPU; use device: cpu"):
        setup_host("cuda")


def test_unknown_device_is_refused():
    with pytest.raises(ConfigurationError, match="must be auto, cpu or cuda, got 'tpu'"):
        setup_host("tpu")


def test_one_process_needs_no_launcher():
    def on_rank(rank, world):
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        with running_host("cpu"):
            value = torch.ones(1)
            dist.all_reduce(value)
            sizes = dist.get_world_size(), value.item()
        return sizes, dist.is_initialized()

    assert run_ranks(1, on_rank) == [((1, 1.0), False)]


def test_several_ranks_without_a_meeting_point_are_refused():
    def on_rank(rank, world):
        dist.destroy_process_group()
        os.environ.pop("MASTER_ADDR", None)
        os.environ.update(WORLD_SIZE="2", RANK="0", MASTER_PORT="1")
        with pytest.raises(ConfigurationError, match="MASTER_ADDR is not set; start with torchrun --nproc-per-node 2"):
            start_distributed(setup_host("cpu"))

    run_ranks(1, on_rank)


def test_environment_that_is_not_a_number_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE must be an integer >= 0, got 'two'"):
        host_module._environment_int("WORLD_SIZE", 1)


def test_stop_is_idempotent():
    def on_rank(rank, world):
        stop_distributed()
        stop_distributed()
        return dist.is_initialized()

    assert run_ranks(1, on_rank) == [False]


def test_missing_triton_replaces_the_one_module_that_needs_it(monkeypatch, tmp_path):
    name = "megatron.core.transformer.moe.ops.paged_stash"
    module = tmp_path / "transformer/moe/ops/paged_stash.py"
    module.parent.mkdir(parents=True)
    module.write_text("import triton\n")
    core = importlib.machinery.ModuleSpec("megatron.core", None, is_package=True)
    core.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: {"megatron.core": core}.get(wanted))
    monkeypatch.delitem(sys.modules, name, raising=False)
    prepare_import()
    replaced = sys.modules.pop(name)
    with pytest.raises(ConfigurationError, match="pip install triton"):
        replaced.paged_stash_copy_kernel[(1,)]


def test_norms_of_a_sequence_parallel_model_are_tagged_for_reduction():
    def on_rank(rank, world, sequence):
        model, _ = tiny_model(ParallelConfig(tensor=2, sequence=sequence))
        tags = {
            getattr(parameter, "sequence_parallel", False)
            for name, parameter in model.bare_chunks[0].named_parameters()
            if "norm" in name
        }
        return tags, model.config.sequence_parallel

    assert run_ranks(2, on_rank, True)[0] == ({True}, True)
    assert run_ranks(2, on_rank, False)[0] == ({False}, False)
