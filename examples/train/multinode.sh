#!/usr/bin/env bash
# Run this on every machine, with its own NODE_RANK:
#
#     MASTER_ADDR=first.machine NODES=2 NODE_RANK=0 examples/train/multinode.sh
#     MASTER_ADDR=first.machine NODES=2 NODE_RANK=1 examples/train/multinode.sh
#
# A machine that fails ends the run on all of them; run it again everywhere and it goes on from the last checkpoint.
set -euo pipefail
: "${MASTER_ADDR:?the first machine, as all others can reach it}" "${NODES:?how many machines}"
: "${NODE_RANK:?the number of this machine, from 0}"
exec torchrun --nnodes "$NODES" --nproc-per-node "${PROCESSES:-2}" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29400}" \
    -m pilotage train "${RECIPE:-$(dirname "$0")/multinode.yaml}" "$@"
