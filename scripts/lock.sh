#!/usr/bin/env bash
# Writes scripts/requirements-ci.txt: every package that CI installs, with its hashes (Linux x86_64, Python 3.11, CPU).
# Run it after a change of setup.py or scripts/constraints.txt. Needs uv (pip install uv). FIND_LINKS=/folder or TORCH_INDEX=URL: where
# the CPU build of torch is found, if the default index doesn't have it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command -v uv >/dev/null || die "uv is not on PATH; pip install uv"
cd "$ROOT"
printf 'setuptools\nwheel\n' | uv pip compile setup.py - --extra dev --extra hf -c scripts/constraints.txt \
  --generate-hashes --no-annotate --no-header --python-version 3.11 --python-platform x86_64-manylinux_2_28 --quiet \
  ${FIND_LINKS:+--find-links "$FIND_LINKS"} ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --output-file "$ROOT/scripts/requirements-ci.txt" >/dev/null
say "wrote scripts/requirements-ci.txt"
