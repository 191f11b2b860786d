"""The tests of tests/gpu are skipped where there is no GPU; their code runs on the CPU, so that it does not rot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("test_loss.py", "test_collectives.py", "test_actor_step.py")


def test_they_pass_on_the_cpu():
    """One layout of each kind of rank count; scripts/test_gpu.sh runs all of them."""
    files = [str(ROOT / "tests" / "gpu" / name) for name in FILES]
    chosen = "not (fused_head or padded or tensor_parallel or context_parallel or pipeline_parallel)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files, "-k", chosen],
        env={**os.environ, "MEGATRON_SUPPORT_TEST_DEVICE": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
