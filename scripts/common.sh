# shellcheck shell=bash
# Sourced by the other scripts: finds Python, makes .venv, installs the package once per change of its requirements.
# PYTHON=/path/to/python3 chooses the interpreter; VENV=/path chooses where the environment goes. REQUIRE_HASHES=1 installs exactly what
# scripts/requirements-ci.txt pins, by hash (Linux x86_64, Python 3.11, CPU): what CI does.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
TORCH_INDEX="${TORCH_INDEX:-}"

say() { printf '\n== %s\n' "$*"; }

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not an executable; give the path of Python 3.10 or newer"
    command -v "$PYTHON"
    return
  fi
  for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  die "no Python 3.10 or newer found; install one, or set PYTHON=/path/to/python3"
}

# install EXTRA...: the package, editable, with extras. Does nothing when setup.py and the constraints are unchanged.
install() {
  local extras stamp key python
  extras="$(IFS=,; echo "$*")"
  if [ -n "${REQUIRE_HASHES:-}" ]; then extras=locked; fi
  python="$(find_python)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is older than Python 3.10; set PYTHON to a newer one"
  key="$(cat "$ROOT/setup.py" "$ROOT/scripts/constraints.txt" "$ROOT/scripts/requirements-ci.txt" | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
  stamp="$VENV/.installed-${extras:-base}"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
    say "environment $VENV is up to date"
    return
  fi
  if [ ! -x "$VENV/bin/python" ]; then
    say "making a virtual environment in $VENV with $python"
    "$python" -m venv "$VENV" || die "cannot make $VENV; install the venv module of $python (Debian: apt-get install python3-venv)"
  fi
  if [ -n "${REQUIRE_HASHES:-}" ]; then
    say "installing what scripts/requirements-ci.txt pins, by hash"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$ROOT/scripts/requirements-ci.txt" \
      || die "pip could not install what scripts/requirements-ci.txt pins; see the lines above, and scripts/lock.sh, which writes it"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e "$ROOT" \
      || die "pip could not install megatron-support; see the lines above"
    printf '%s' "$key" > "$stamp"
    return
  fi
  say "installing torch (constraints: scripts/constraints.txt)"
  # A GPU host that has no torch yet gets the release pinned in the constraints from its own index (TORCH_INDEX).
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    "$(grep '^torch==' "$ROOT/scripts/constraints.txt")" || die "pip could not install torch; see the lines above"
  say "installing megatron-support${extras:+[$extras]}"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/scripts/constraints.txt" \
    -e "$ROOT${extras:+[$extras]}" || die "pip could not install megatron-support; see the lines above"
  printf '%s' "$key" > "$stamp"
}

# find_installed: a Python that has megatron-support: of $VENV, else $PYTHON, else the one on PATH (a container's own).
find_installed() {
  local python
  for python in "$VENV/bin/python" "${PYTHON:-}" python3 python; do
    if [ -n "$python" ] && command -v "$python" >/dev/null && "$python" -c '
import sys
from importlib.util import find_spec
sys.exit(not all(map(find_spec, ("torch", "megatron", "megatron_support"))))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  die "megatron-support is not installed in VENV=$VENV, nor for the Python on PATH; run scripts/quickstart.sh once, or set VENV or PYTHON to where it is"
}

# require_integer NAME LEAST MOST MEANING: the environment variable NAME is an integer in that range.
require_integer() {
  local value="${!1:-}" range=">= $2"
  [ "$3" = any ] || range="in $2..$3"
  [ -n "$value" ] || die "$1 is not set; set it to $4"
  if ! [[ "$value" =~ ^(0|[1-9][0-9]{0,5})$ ]] || [ "$value" -lt "$2" ] \
    || { [ "$3" != any ] && [ "$value" -gt "$3" ]; }; then
    die "$1 must be an integer $range, got '$value'; set it to $4"
  fi
}

# default_ranks: sets NPROC_PER_NODE to the number of GPUs of this machine where it is not set, and checks it.
default_ranks() {
  if [ -z "${NPROC_PER_NODE:-}" ] && command -v nvidia-smi >/dev/null; then
    NPROC_PER_NODE="$(nvidia-smi --list-gpus | grep -c '^GPU' || true)"
    [ "$NPROC_PER_NODE" != 0 ] || NPROC_PER_NODE=
  fi
  require_integer NPROC_PER_NODE 1 any "the number of ranks on this machine (its GPUs; on CPUs a multiple of what the recipe's parallel needs)"
}

# start COMMAND...: replaces this shell by the command, or prints it under --dry-run (DRY_RUN=1).
start() {
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
  if [ -n "${DRY_RUN:-}" ]; then
    printf 'OMP_NUM_THREADS=%q CUDA_DEVICE_MAX_CONNECTIONS=%q' "$OMP_NUM_THREADS" "$CUDA_DEVICE_MAX_CONNECTIONS"
    printf ' %q' "$@"
    printf '\n'
    return
  fi
  exec "$@"
}
