#!/usr/bin/env bash
# Train on Slurm, one task a GPU:
#
#   sbatch --nodes=4 scripts/launch_slurm.sh configs/NAME.yaml trainer.total_epochs=1
#
# Options given to sbatch override those below. --gpus-per-node, not --gpus-per-task: each rank must see all GPUs of its
# host, and takes the GPU of its local rank. MODULE selects another entry point than megarl.commands.train.
#
# Ten minutes before its time limit (--signal) the job finishes its step, saves and is requeued: choose a longer time if a
# step and a save take longer. `scancel --signal=USR1 JOB` does the same at once; `scancel JOB` ends the job for good.
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

# --wait: after a rank has failed, the others, which may wait for it, have a minute. --kill-on-bad-exit would kill ranks
# while they stop one after another after a signal.
code=0
srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none "$python" -m "${MODULE:-megarl.commands.train}" "$@" \
    "trainer.nnodes=$SLURM_JOB_NUM_NODES" "trainer.n_gpus_per_node=$SLURM_NTASKS_PER_NODE" || code=$?
# The number of an array names all of its jobs.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
((code != 75)) || scontrol requeue "$job" # 75: stopped by a signal and saved (docs/reliability.md)
exit "$code"
