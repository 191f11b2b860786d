#!/usr/bin/env bash
# Looks up every pinned package in the Python advisory database (pip-audit; needs network). Exit 1 on a known vulnerability.
# Usage: scripts/audit.sh [pip-audit arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python="$(find_python)"
tools="$VENV-audit"
[ -x "$tools/bin/pip-audit" ] || { "$python" -m venv "$tools" && "$tools/bin/python" -m pip install --quiet --disable-pip-version-check pip-audit; }
# An advisory names a release, not a local build: 2.13.0, not 2.13.0+cpu.
pins="$(mktemp)"
trap 'rm -f "$pins"' EXIT
sed -E 's/^([A-Za-z0-9_.-]+==[^+ ]+)\+[a-z0-9]+/\1/' "$ROOT/scripts/requirements-ci.txt" | grep -oE '^[A-Za-z0-9_.-]+==[^ ]+' > "$pins"
"$tools/bin/pip-audit" --requirement "$pins" --disable-pip --no-deps --strict "$@"
