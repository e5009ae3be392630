#!/usr/bin/env bash
# Train with Open MPI. HOSTS names each host and its number of ranks; the checkout is at the same path on all of them:
#
#   HOSTS=localhost:2 scripts/launch_mpirun.sh configs/NAME.yaml trainer.total_epochs=1
#   HOSTS=node001:8,node002:8 scripts/launch_mpirun.sh configs/NAME.yaml
#
# MODULE is another entry point than megarl.commands.train. Arguments for mpirun itself go in MPIRUN_ARGS.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python)}
IFS=, read -ra hosts <<<"${HOSTS:-localhost:1}"
gpus=${hosts[0]##*:}
for host in "${hosts[@]}"; do
    [[ $host == *:"$gpus" ]] || { echo "HOSTS: write HOST:RANKS, the same RANKS for all; not '$host'" >&2; exit 1; }
done
export MASTER_ADDR=${MASTER_ADDR:-${hosts[0]%:*}} MASTER_PORT=${MASTER_PORT:-$((20000 + $$ % 10000))}

# --bind-to none: the threads of a rank may use all cores, not only the core that Open MPI would bind it to.
args=(--host "$(IFS=,; echo "${hosts[*]}")" -n $((gpus * ${#hosts[@]})) --bind-to none -x MASTER_ADDR -x MASTER_PORT)
[[ $EUID -ne 0 ]] || args+=(--allow-run-as-root)

# On Ctrl-C, SIGTERM and SIGHUP mpirun would kill the ranks. In its own process group it does not get these signals. This
# script sends SIGUSR1 for the first signal: the ranks finish their step and save. A second Ctrl-C or SIGTERM ends
# everything; a second SIGHUP does not, as a terminal that closes may send several.
set -m
own=()
command -v setpriv >/dev/null && own=(setpriv --pdeathsig KILL) # mpirun does not outlive this script
# shellcheck disable=SC2086 # MPIRUN_ARGS is several words
"${own[@]}" mpirun "${args[@]}" ${MPIRUN_ARGS:-} "$python" -m "${MODULE:-megarl.commands.train}" "$@" \
    "trainer.nnodes=${#hosts[@]}" "trainer.n_gpus_per_node=$gpus" </dev/null &
mpirun=$!
told=
tell() {
    if [[ $told ]]; then
        (($1 != 1)) || return 0
        kill -KILL "$mpirun"
        exit $((128 + $1))
    fi
    told=yes
    echo "megarl: the ranks are told to finish their step and to save; a second signal ends the job at once" >&2 || : # no terminal
    kill -USR1 "$mpirun"
}
trap 'tell 2' INT
trap 'tell 15' TERM
trap 'tell 1' HUP # under nohup bash keeps ignoring it
# Bash obeys a signal that comes just before `wait` only when `wait` ends, so no wait is long.
while kill -0 "$mpirun" 2>/dev/null; do
    sleep 0.5 </dev/null >/dev/null 2>&1 &
    wait $! || :
done
wait "$mpirun"
