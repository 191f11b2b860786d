#!/usr/bin/env bash
# Optional: tests of the adapters in host frameworks that the package index has, in .venv-hosts. Nothing else needs them.
# Usage: scripts/test_hosts.sh [pytest arguments]   PYTHON=/path/to/python3 and VENV=/path as for scripts/test.sh.
set -euo pipefail
VENV="${VENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-hosts}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Without dependencies: verl asks for inference engines that a test of its trainer does not need, and imports these.
VERL="verl==0.9.1"
VERL_IMPORTS=(
  antlr4-python3-runtime==4.9.3 cachetools click cloudpickle codetiming datasets dill fastapi hydra-core importlib_metadata
  jsonschema jsonschema_specifications msgpack multiprocess opentelemetry-api opentelemetry-sdk
  opentelemetry-semantic-conventions orjson pandas peft pybind11 pylatexenc python-dateutil pytz pyvers ray referencing
  rpds-py six starlette tensordict torchdata tzdata uvicorn wandb xxhash zipp
)

install dev hf
cd "$ROOT"
stamp="$VENV/.installed-hosts"
key="$VERL ${VERL_IMPORTS[*]}"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$key" ]; then
  say "installing $VERL and what it imports"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$VERL" "${VERL_IMPORTS[@]}" \
    || die "pip could not install the hosts; see the lines above"
  printf '%s' "$key" > "$stamp"
fi
say "tests: adapters in their hosts"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
exec "$VENV/bin/python" -W ignore -m pytest tests/adapters "$@"
