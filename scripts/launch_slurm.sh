#!/usr/bin/env bash
# Train on Slurm, one task a GPU:
#
#   sbatch --nodes=4 scripts/launch_slurm.sh configs/NAME.yaml trainer.total_epochs=1
#
# Options given to sbatch override those below. --gpus-per-node, not --gpus-per-task: each rank must see all GPUs of its
# host, of which it takes the one with its local number. MODULE is another entry point than megarl.train.
#SBATCH --job-name=megarl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file from elsewhere: submit from the root of the checkout

python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}

# --kill-on-bad-exit: when one rank fails, the others would wait for it until their timeout.
exec srun --kill-on-bad-exit=1 --cpu-bind=none "$python" -m "${MODULE:-megarl.train}" "$@" \
    "trainer.nnodes=$SLURM_JOB_NUM_NODES" "trainer.n_gpus_per_node=$SLURM_NTASKS_PER_NODE"
