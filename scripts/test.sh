#!/usr/bin/env bash
# Installs what tests need into .venv (with the SmolLM2 weights), lints, checks types and runs every test.
# Usage: scripts/test.sh [--full] [pytest arguments]   --full: all layouts of up to eight ranks.   PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install dev hf
"$ROOT/scripts/fetch_smollm2.sh"
cd "$ROOT"
say "lint: ruff"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
say "types: mypy"
"$VENV/bin/mypy"
say "tests: pytest"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
exec "$VENV/bin/python" -m pytest "$@"
