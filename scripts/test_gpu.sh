#!/usr/bin/env bash
# Runs tests/gpu: NCCL with a rank for each GPU (one is enough), and Transformer Engine and Apex where they are installed.
# Usage: scripts/test_gpu.sh [pytest arguments]   MEGATRON_SUPPORT_TEST_DEVICE=cpu runs them on the CPU with gloo.
# It needs a CUDA build of torch: where there is none yet, set TORCH_INDEX. PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install dev
cd "$ROOT"
export MEGATRON_SUPPORT_TEST_DEVICE="${MEGATRON_SUPPORT_TEST_DEVICE:-cuda}"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
if [ "$MEGATRON_SUPPORT_TEST_DEVICE" = cuda ]; then
  "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || die "torch in $VENV sees no GPU; install a CUDA build (TORCH_INDEX=URL), or set MEGATRON_SUPPORT_TEST_DEVICE=cpu"
fi
say "tests on $MEGATRON_SUPPORT_TEST_DEVICE: pytest"
exec "$VENV/bin/python" -m pytest -rs tests/gpu "$@"
