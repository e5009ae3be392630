#!/usr/bin/env bash
# Train with torchrun. On one host:
#
#   scripts/launch_torchrun.sh configs/NAME.yaml trainer.total_epochs=1
#
# On several hosts, the same command on each, with its number and the address of host 0:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node001 scripts/launch_torchrun.sh configs/NAME.yaml
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node001 scripts/launch_torchrun.sh configs/NAME.yaml
#
# GPUS_PER_NODE (default: all that nvidia-smi lists, else 1) is the number of ranks a host; MODULE another entry point.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
nodes=${NNODES:-1}
gpus=${GPUS_PER_NODE:-$({ nvidia-smi --list-gpus 2>/dev/null || echo one CPU; } | wc -l)}

rendezvous=(--standalone)
if ((nodes > 1)); then
    rendezvous=(--nnodes "$nodes" --node-rank "${NODE_RANK:?number of this host, from 0}"
        --master-addr "${MASTER_ADDR:?address of host 0}" --master-port "${MASTER_PORT:-29500}")
fi
# The agent is torchrun, except that the ranks finish their step and save on Ctrl-C, SIGTERM and SIGHUP.
exec "$python" -m megarl.distributed.agent "${rendezvous[@]}" --nproc-per-node "$gpus" \
    -m "${MODULE:-megarl.commands.train}" "$@" "trainer.nnodes=$nodes" "trainer.n_gpus_per_node=$gpus"
