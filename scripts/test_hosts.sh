#!/usr/bin/env bash
# Tests adapters against real releases of their hosts, which are downloaded into a cache and come first on PYTHONPATH.
# Usage: scripts/test_hosts.sh [megatron_lm | verl]...   HOSTS_CACHE=/path chooses the cache.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

HOSTS_CACHE="${HOSTS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_support/hosts}"

# What verl's trainer imports; its distribution asks for inference engines too, which no test here needs.
VERL=(
  verl==0.9.1 antlr4-python3-runtime==4.9.3 attrs==26.1.0 cachetools==8.0.2 cloudpickle==3.1.3 codetiming==1.4.0 datasets==5.2.0
  dill==0.4.1 fastapi==0.165.0 hydra-core==1.3.8 importlib_metadata==10.2.0 jsonschema==4.26.0
  jsonschema-specifications==2025.9.1 msgpack==1.2.4 multiprocess==0.70.19 opentelemetry-api==1.45.2
  opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 orjson==3.13.0 pandas==3.1.1 peft==0.21.2
  pybind11==3.1.0 pylatexenc==2.11 pytz==2026.6 pyvers==0.2.3 ray==2.60.0 referencing==0.37.0 rpds-py==2026.9.1
  starlette==1.10.0 tensordict==0.15.3 torchdata==0.11.0 uvicorn==0.54.0 wandb==0.31.0 xxhash==4.1.0 zipp==4.1.2
)

# wheel DISTRIBUTION VERSION: the folder that the wheel is unpacked in; dependencies are not installed.
wheel() {
  local folder="$HOSTS_CACHE/$1-$2"
  if [ ! -d "$folder" ]; then
    rm -rf "$folder.part" && mkdir -p "$folder.part"
    "$VENV/bin/python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest "$folder.part" "$1==$2" >&2
    "$VENV/bin/python" -m zipfile -e "$folder.part"/*.whl "$folder.part"
    rm "$folder.part"/*.whl
    mv "$folder.part" "$folder"
  fi
  echo "$folder"
}

# installed REQUIREMENT...: the folder that these, and no dependencies, are installed in.
installed() {
  local folder
  folder="$HOSTS_CACHE/${1/==/-}-$("$VENV/bin/python" -c 'import sys; print(sys.implementation.cache_tag)')"
  if [ ! -d "$folder" ]; then
    rm -rf "$folder.part"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder.part" "$@" >&2
    mv "$folder.part" "$folder"
  fi
  echo "$folder"
}

run_tests() {  # FOLDER FILE...
  local folder="$1"
  shift
  PYTHONPATH="$folder:$ROOT" "$VENV/bin/python" -m pytest "$@"
}

test_megatron_lm() {
  say "Megatron-LM: megatron.training of megatron-core 0.19.2"
  run_tests "$(wheel megatron-core 0.19.2)" tests/adapters/test_megatron_lm.py tests/adapters/test_megatron_lm_example.py
}

test_verl() {
  say "verl: ${VERL[0]}"
  run_tests "$(installed "${VERL[@]}")" tests/adapters/test_verl.py tests/adapters/test_verl_host.py
}

install dev hf
cd "$ROOT"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
if [ $# -eq 0 ]; then
  set -- megatron_lm verl
fi
for host in "$@"; do
  declare -F "test_$host" >/dev/null || die "host must be megatron_lm or verl, got $host"
  "test_$host"
done
