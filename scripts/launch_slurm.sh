#!/usr/bin/env bash
# Train on Slurm, one task a GPU:
#
#   sbatch --nodes=4 scripts/launch_slurm.sh configs/NAME.yaml trainer.total_epochs=1
#
# Options given to sbatch override those below. --gpus-per-node, not --gpus-per-task: each rank must see all GPUs of its
# host, of which it takes the one with its local number. MODULE is another entry point than megarl.train.
#
# Ten minutes before the end of its time (--signal) the job finishes its step, saves and is requeued: give it longer than
# a step and a save take. `scancel --signal=USR1 JOB` does the same at once; `scancel JOB` ends it for good.
#SBATCH --job-name=megarl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@600
set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file from elsewhere: submit from the root of the checkout

python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}

# --wait: when one rank has failed, the others, which may wait for it, have a minute. --kill-on-bad-exit would not let
# ranks that were told to end leave one after another, each with its code.
code=0
srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none "$python" -m "${MODULE:-megarl.train}" "$@" \
    "trainer.nnodes=$SLURM_JOB_NUM_NODES" "trainer.n_gpus_per_node=$SLURM_NTASKS_PER_NODE" || code=$?
((code != 75)) || scontrol requeue "$SLURM_JOB_ID" # 75: told to end, saved, can go on (docs/reliability.md)
exit "$code"
