#!/usr/bin/env bash
# Trains on this machine, one rank for each GPU (or NPROC_PER_NODE ranks).
# Usage: scripts/train.sh [--dry-run] RECIPE [field.sub=value ...]     --dry-run: print the command, start nothing
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DRY_RUN=
if [ "${1:-}" = --dry-run ]; then DRY_RUN=1; shift; fi
[ "$#" -gt 0 ] || die "no recipe given; usage: scripts/train.sh [--dry-run] RECIPE [field.sub=value ...], see configs/"
[ -f "$1" ] || die "RECIPE must be a file, got '$1'; give one of configs/*.yaml or your own"
default_ranks
python="$(find_installed)"
start "$python" -m megatron_support train "$@" --ranks "$NPROC_PER_NODE"
