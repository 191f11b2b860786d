"""The device kernels: by Triton's interpreter, compiled for a GPU, and on an accelerator where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_support import SamplingParams
from tests.unit.support_kernel_cases import TOKENS, VOCABULARY, run

pytest.importorskip("triton", reason="Triton comes with torch on Linux only")


def test_the_interpreter_agrees_with_plain_torch():
    cases = Path(__file__).with_name("support_kernel_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_compile_for_a_gpu():
    """Down to the assembly of a GPU that need not be there."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_support.support.kernels import row_kernels

    wide = {"sums": "*fp64", "index": "*i64", "last_tie": "*i64", "target_column": "*i64", "wanted": "*i8"}
    numbers = {"columns": "i32", "row_stride": "i64", "out_stride": "i64", "per_split": "i32"}
    flags = {"SCALED": True, "ENTROPY": True, "KEPT": True, "TIES": True, "ALL": True, "SPLITS": 8, "BLOCK": 2048}
    for kernel in (row_kernels._sums_kernel, row_kernels._gradient_kernel):
        constants = {name: flags[name] for name in kernel.arg_names if name in flags}
        signature = {
            name: "constexpr"
            if name in flags
            else wide.get(name) or numbers.get(name) or ("*bf16" if name in ("logits", "out") else "*fp32")
            for name in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        built = compile_kernel(source, target=GPUTarget("cuda", 90, 32))
        assert ".target sm_90" in built.asm["ptx"]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, 50, 0.9), SamplingParams(1.0, None, 0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_accelerator_agrees_with_the_cpu(sampling, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(TOKENS, VOCABULARY) * 3).to(dtype)
    want, want_grad = run(logits, sampling, "group", "filtered unfiltered entropy")
    outputs, grad = run(
        logits.to(torch.accelerator.current_accelerator()), sampling, "group", "filtered unfiltered entropy"
    )
    for mine, theirs in zip(outputs, want, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.cpu(), want_grad, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)
