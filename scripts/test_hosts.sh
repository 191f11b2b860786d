#!/usr/bin/env bash
# Tests adapters against real releases of their hosts, which are downloaded into a cache and come first on PYTHONPATH.
# Usage: scripts/test_hosts.sh [megatron_lm]...   HOSTS_CACHE=/path chooses the cache.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

HOSTS_CACHE="${HOSTS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_support/hosts}"

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

run_tests() {  # FOLDER FILE...
  local folder="$1"
  shift
  PYTHONPATH="$folder:$ROOT" "$VENV/bin/python" -m pytest "$@"
}

test_megatron_lm() {
  say "Megatron-LM: megatron.training of megatron-core 0.19.2"
  run_tests "$(wheel megatron-core 0.19.2)" tests/adapters/test_megatron_lm.py tests/adapters/test_megatron_lm_example.py
}

install dev hf
cd "$ROOT"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
for host in "${@:-megatron_lm}"; do
  declare -F "test_$host" >/dev/null || die "host must be megatron_lm, got $host"
  "test_$host"
done
