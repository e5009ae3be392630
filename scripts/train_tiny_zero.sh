#!/usr/bin/env bash
# Train as TinyZero's train_tiny_zero.sh does: its arguments, with `megarl train` as the program.
#
#   export N_GPUS=2 BASE_MODEL=Qwen/Qwen2.5-3B DATA_DIR=data/countdown ROLLOUT_TP_SIZE=2 EXPERIMENT_NAME=countdown-qwen2.5-3b
#   bash scripts/train_tiny_zero.sh [a.b.c=value ...]
#
# DATA_DIR holds train.parquet and test.parquet as TinyZero's prepare scripts write them: a prompt is a list of one
# message, which is already the complete text. The one argument that TinyZero does not have, apply_chat_template=false,
# keeps a tokenizer with a chat template from wrapping that text again. Your own arguments win over those below.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$([[ -x $root/.venv/bin/python ]] && echo "$root/.venv/bin/python" || echo python)}

exec "$python" -m megarl train \
"data.train_files=$DATA_DIR/train.parquet" \
"data.val_files=$DATA_DIR/test.parquet" \
data.train_batch_size=256 \
data.val_batch_size=1312 \
data.max_prompt_length=256 \
data.max_response_length=1024 \
"actor_rollout_ref.model.path=$BASE_MODEL" \
actor_rollout_ref.actor.optim.lr=1e-6 \
actor_rollout_ref.actor.ppo_mini_batch_size=128 \
actor_rollout_ref.actor.ppo_micro_batch_size=8 \
actor_rollout_ref.rollout.log_prob_micro_batch_size=8 \
"actor_rollout_ref.rollout.tensor_model_parallel_size=$ROLLOUT_TP_SIZE" \
actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
actor_rollout_ref.ref.log_prob_micro_batch_size=4 \
critic.optim.lr=1e-5 \
"critic.model.path=$BASE_MODEL" \
critic.ppo_micro_batch_size=8 \
algorithm.kl_ctrl.kl_coef=0.001 \
trainer.logger=['wandb'] \
trainer.val_before_train=False \
trainer.default_hdfs_dir=null \
"trainer.n_gpus_per_node=$N_GPUS" \
trainer.nnodes=1 \
trainer.save_freq=100 \
trainer.test_freq=100 \
trainer.project_name=TinyZero \
"trainer.experiment_name=$EXPERIMENT_NAME" \
trainer.total_epochs=15 \
data.apply_chat_template=false "$@"
