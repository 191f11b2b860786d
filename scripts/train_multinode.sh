#!/usr/bin/env bash
# Trains on several machines: run it once on each, with the same arguments.
# Usage: NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 [MASTER_PORT=29500] [NPROC_PER_NODE=8] \
#          scripts/train_multinode.sh [--dry-run] RECIPE [field.sub=value ...]     --dry-run: print the command only
#   NNODES, NODE_RANK           number of machines; this one, from 0
#   MASTER_ADDR, MASTER_PORT    where machine 0 is and listens: the others meet it there
#   NPROC_PER_NODE              ranks of a machine, the same on all (default: its GPUs)
#   MAX_RESTARTS                how often all ranks are started again after one failed (default 0)
#   JOIN_TIMEOUT                seconds that machines wait for each other (default 900)
#   TORCH_DISABLE_SHARE_RDZV_TCP_STORE   1: ranks that start again meet in a new store, not among those gone (default 1)
#   LOCAL_ADDR                  this machine's address as the others see it (default: on the route to MASTER_ADDR)
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DRY_RUN=
if [ "${1:-}" = --dry-run ]; then DRY_RUN=1; shift; fi
[ "$#" -gt 0 ] || die "no recipe given; usage: scripts/train_multinode.sh [--dry-run] RECIPE [field.sub=value ...], see configs/"
[ -f "$1" ] || die "RECIPE must be a file, got '$1'; give one that every machine has, e.g. of configs/"
require_integer NNODES 1 any "the number of machines"
require_integer NODE_RANK 0 "$((NNODES - 1))" "this machine's number: 0 on the first, and so on (NNODES=$NNODES)"
[ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is not set; set it to a name or address of machine 0 that all reach"
MASTER_PORT="${MASTER_PORT:-29500}" MAX_RESTARTS="${MAX_RESTARTS:-0}" JOIN_TIMEOUT="${JOIN_TIMEOUT:-900}"
require_integer MASTER_PORT 1 65535 "a free port of machine 0, the same on all"
require_integer MAX_RESTARTS 0 any "how often failed ranks start again"
require_integer JOIN_TIMEOUT 1 any "the seconds that machines wait for each other"
# the launcher would keep one store over restarts (pytorch/pytorch#135712)
: "${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:=1}"; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE
default_ranks
python="$(find_installed)"

# The machine of rank 0 tells the others this address. Its own host name would do on many clusters, not on all. A name
# that is not known yet (a pod that is still being made) leaves it to torchrun.
own_address() {
  "$python" - "$MASTER_ADDR" "$MASTER_PORT" <<'PYTHON'
import socket
import sys

host, port = sys.argv[1:]
try:
    family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)  # sends nothing: a datagram socket only looks the route up
        print(route.getsockname()[0])
except OSError:
    pass
PYTHON
}

port_is_free() {
  "$python" - "$MASTER_PORT" <<'PYTHON'
import socket
import sys

with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", int(sys.argv[1])))
    except OSError:
        sys.exit(1)
PYTHON
}

is_host=false
if [ "$NODE_RANK" = 0 ]; then
  is_host=true
  LOCAL_ADDR="${LOCAL_ADDR:-$MASTER_ADDR}"
  [ -n "$DRY_RUN" ] || port_is_free || die "MASTER_PORT=$MASTER_PORT is in use on this machine; set it to another on all"
else
  LOCAL_ADDR="${LOCAL_ADDR:-$(own_address)}"
fi

[ -z "$DRY_RUN" ] || printf 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE=%q ' "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
start "$python" -m torch.distributed.run --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" \
  --max-restarts "$MAX_RESTARTS" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
  --rdzv-id "megatron-support-$MASTER_PORT" \
  --rdzv-conf "is_host=$is_host,read_timeout=$JOIN_TIMEOUT,join_timeout=$JOIN_TIMEOUT" \
  ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} -m megatron_support train "$@"
