"""The device kernels: by Triton's interpreter, and compiled for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; the extra dev installs it on Linux")

INTEGERS = ("first_id", "vocabulary", "columns", "groups", "per_split", "count")
POINTERS = {"logits": "*bf16", "out": "*bf16", "sums": "*fp64", "amount": "*fp64", "chosen": "*i32", "wanted": "*i8"}
POINTERS |= dict.fromkeys(("index", "targets", "bars", "places", "order", "listed", "state"), "*i64")
POINTERS |= dict.fromkeys(("mass", "counts", "found", "last_tie", "target_column"), "*i64")
FLAGS = {"SCALED": True, "ENTROPY": True, "MAXIMA": True, "KEPT": True, "TIES": True, "ALL": True}
FLAGS |= {"FIRST": False, "BY_COUNT": False, "SPLITS": 8, "GROUP": 128, "TILE": 32, "COUNT": 160, "PROGRAMS": 1024}
FLAGS |= {"BINS": 256, "ROOM": 256, "BLOCK": 4096}
KERNELS = {
    "statistics": ["_statistics_kernel"],
    "selection": ["_choose_groups_kernel", "_select_kernel"],
    "boundary": ["_histogram_kernel", "_narrow_kernel", "_count_kernel", "_locate_kernel"],
    "gradient": ["_gradient_kernel", "_scatter_kernel"],
}
VARIANTS = {
    "_choose_groups_kernel": {"ROOM": 2048},
    "_histogram_kernel": {"FIRST": True},
    "_narrow_kernel": {"FIRST": True},
}


def test_the_interpreter_agrees_with_plain_torch():
    cases = Path(__file__).with_name("support_kernel_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in KERNELS.items() for name in names])
def test_kernels_compile_for_a_gpu(module, name):
    """Down to the assembly of a GPU that need not be there."""
    from importlib import import_module

    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"megatron_support.support.kernels.{module}"), name)
    pointers = POINTERS | ({"wanted": "*i64"} if name == "_locate_kernel" else {})

    def kind(argument: str) -> str:
        if argument in FLAGS:
            return "constexpr"
        if argument.endswith("stride"):
            return "i64"
        return "i32" if argument in INTEGERS else pointers.get(argument, "*fp32")

    for flags in filter(None, (FLAGS, VARIANTS.get(name))):
        constants = {argument: value for argument, value in {**FLAGS, **flags}.items() if argument in kernel.arg_names}
        signature = {argument: kind(argument) for argument in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assembly = compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert ".target sm_90" in assembly
        # integers alone are added in any order
        assert not [line for line in assembly.splitlines() if "red." in line and ".f" in line]
