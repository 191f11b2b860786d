"""One thread per process: ranks are forked from here, and an OpenMP pool does not survive a fork."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-Core asserts it for tensor parallelism

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("tests", deadline=None, derandomize=True)  # equal on every host
settings.load_profile("tests")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the whole matrix of layouts, not a pairwise subset")
