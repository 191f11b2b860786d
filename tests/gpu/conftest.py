"""Tests of this folder run on CUDA, and are skipped where torch sees no GPU.

``MEGATRON_SUPPORT_TEST_DEVICE=cpu`` runs what they can show on the CPU with gloo: the same code, another device.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.setup import Machine


@pytest.fixture(scope="session", autouse=True)
def machine() -> Machine:
    kind = os.environ.get("MEGATRON_SUPPORT_TEST_DEVICE", "cuda")
    assert kind in ("cuda", "cpu"), f"MEGATRON_SUPPORT_TEST_DEVICE must be cuda or cpu, got {kind!r}"
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU; MEGATRON_SUPPORT_TEST_DEVICE=cpu runs these tests on the CPU")
    # two ranks on the CPU; with NCCL a rank has a GPU to itself, and four are enough to have two kinds of parallelism
    return Machine(kind, 2 if kind == "cpu" else min(torch.cuda.device_count(), 4))


@pytest.fixture(scope="session")
def device(machine: Machine) -> torch.device:
    return torch.device(machine.kind)
