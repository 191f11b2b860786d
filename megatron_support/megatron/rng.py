"""The random state of one rank: Python, NumPy where it is in use, torch, the device, Megatron's tracker."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def random_state(device: torch.device) -> dict[str, Any]:
    """Everything that a draw on this rank may depend on, as plain values and tensors.

    Args:
        device: the one that the model is on.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random.get_state()
        state["numpy"] = [numpy[0], numpy[1].tolist(), *numpy[2:]]
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what :func:`random_state` returned on a rank of the same place in the same layout."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)
