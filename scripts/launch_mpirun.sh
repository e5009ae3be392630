#!/usr/bin/env bash
# Train with Open MPI. HOSTS names each host and its number of ranks; the checkout is at the same path on all of them:
#
#   HOSTS=localhost:2 scripts/launch_mpirun.sh configs/NAME.yaml trainer.total_epochs=1
#   HOSTS=node001:8,node002:8 scripts/launch_mpirun.sh configs/NAME.yaml
#
# MODULE is another entry point than megarl.train. Arguments for mpirun itself go in MPIRUN_ARGS.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python)}
IFS=, read -ra hosts <<<"${HOSTS:-localhost:1}"
gpus=${hosts[0]##*:}
for host in "${hosts[@]}"; do
    [[ $host == *:"$gpus" ]] || { echo "HOSTS: write HOST:RANKS, the same RANKS for all; not '$host'" >&2; exit 1; }
done
export MASTER_ADDR=${MASTER_ADDR:-${hosts[0]%:*}} MASTER_PORT=${MASTER_PORT:-$((20000 + $$ % 10000))}

# --bind-to none: a rank's threads may use all cores, not the one that Open MPI would pin it to.
args=(--host "$(IFS=,; echo "${hosts[*]}")" -n $((gpus * ${#hosts[@]})) --bind-to none -x MASTER_ADDR -x MASTER_PORT)
[[ $EUID -ne 0 ]] || args+=(--allow-run-as-root)
# shellcheck disable=SC2086 # MPIRUN_ARGS is several words
exec mpirun "${args[@]}" ${MPIRUN_ARGS:-} "$python" -m "${MODULE:-megarl.train}" "$@" \
    "trainer.nnodes=${#hosts[@]}" "trainer.n_gpus_per_node=$gpus"
