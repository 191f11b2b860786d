#!/usr/bin/env bash
# Installs into .venv and trains the embedded default: a tiny GPT learns a string task on 2 CPU ranks (TP=2).
# Usage: scripts/quickstart.sh [field.subfield=value ...]     PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# shellcheck disable=SC2119
install # no extras
say "training configs/quickstart.yaml under torchrun on 2 CPU ranks (tensor parallel); run folders go to ./runs"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
# --ranks is torchrun --standalone, with the command's own exit code; the same under torchrun itself:
#   torchrun --standalone --nproc-per-node 2 --no-python megatron-support train configs/quickstart.yaml
exec "$VENV/bin/megatron-support" train "$ROOT/configs/quickstart.yaml" --ranks 2 "$@"
