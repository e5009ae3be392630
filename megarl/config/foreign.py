"""Keys and values of other trainers: other spellings, the equivalent keys of megarl, and features that it lacks.

An alias is read as the key of megarl. Any other foreign key gets a fault that says what to write instead, or that the
feature is not supported. Keys with only one possible value are in `megarl.config.fixed`.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

ALIASES = {
    "ppo_micro_batch_size_per_gpu": "ppo_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "log_prob_micro_batch_size",
    "forward_micro_batch_size_per_gpu": "forward_micro_batch_size",
    "micro_batch_size_per_gpu": "micro_batch_size",
    "ppo_max_token_len": "ppo_max_token_len_per_gpu",
    "n_procs_per_node": "n_gpus_per_node",
    "entropy_coef": "entropy_coeff",
    "clip_grad": "grad_clip",
    "lr_decay_style": "warmup_style",
    "lr_scheduler_type": "warmup_style",
    "lr_decay_steps": "total_training_steps",
}
"""The last part of a path in other versions of the vocabulary -> the name here."""

_MEGATRON_KEY = "belongs to FSDP; models are partitioned by Megatron-Core: write {owner}megatron."
_REMOVE = "remove it: "
_ONE_BUDGET = "is decided for all models at once: write actor_rollout_ref.actor.use_dynamic_bsz"
_NOT = "is not supported: "
_TEXT_ALONE = _NOT + "prompts and responses are text"
_NO_ADAPTERS = _NOT + "adapters, all parameters are trained"
_NO_TOOLS = _NOT + "environment.name gives responses further turns (docs/environments.md)"
_NO_RAY = _REMOVE + "there is no Ray; every rank runs the same program under torchrun, mpirun or srun"

FOREIGN_KEYS = (
    ("*fsdp_config.param_offload", _MEGATRON_KEY + "param_offload"),
    ("*fsdp_config.grad_offload", _MEGATRON_KEY + "grad_offload"),
    ("*fsdp_config.optimizer_offload", _MEGATRON_KEY + "optimizer_offload"),
    ("*fsdp_config.*dtype", _MEGATRON_KEY + "dtype"),
    ("*fsdp_config.mixed_precision*", _MEGATRON_KEY + "dtype"),
    (
        "*fsdp_size",
        _MEGATRON_KEY + "tensor_model_parallel_size and {owner}megatron.pipeline_model_parallel_size; "
        "the data-parallel size is what remains of the world",
    ),
    (
        "*fsdp_config*",
        "belongs to FSDP, while models are partitioned by Megatron-Core: see the keys of {owner}megatron",
    ),
    (
        "*ulysses_sequence_parallel_size",
        "sequences are split by Megatron's tensor parallelism: write {owner}megatron.tensor_model_parallel_size "
        "with {owner}megatron.sequence_parallel=true",
    ),
    ("*use_liger", _REMOVE + "fused kernels are chosen by themselves (see megarl doctor)"),
    ("*use_fused_kernels", _REMOVE + "fused kernels are chosen by themselves (see megarl doctor)"),
    ("*fused_kernel_options*", _REMOVE + "fused kernels are chosen by themselves (see megarl doctor)"),
    ("*use_torch_compile", _REMOVE + "models run Megatron-Core's kernels, uncompiled"),
    ("*enable_activation_offload", "write enable_gradient_checkpointing=true in the model's section"),
    ("*log_prob_use_dynamic_bsz", _ONE_BUDGET),
    ("critic.use_dynamic_bsz", _ONE_BUDGET),
    ("reward_model.use_dynamic_bsz", _ONE_BUDGET),
    (
        "critic.*max_token_len_per_gpu",
        "the critic has the actor's token budget: write actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ),
    (
        "reward_model.*max_token_len_per_gpu",
        "the reward model has the actor's token budget: write actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ),
    (
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        "is the actor's token budget: write actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ),
    (
        "actor_rollout_ref.rollout.max_model_len",
        "follows from actor_rollout_ref.rollout.prompt_length + response_length: set data.max_prompt_length and "
        "data.max_response_length",
    ),
    (
        "actor_rollout_ref.rollout.enable_chunked_prefill",
        "write +actor_rollout_ref.rollout.engine_kwargs.enable_chunked_prefill",
    ),
    (
        "actor_rollout_ref.rollout.disable_log_stats",
        "write +actor_rollout_ref.rollout.engine_kwargs.disable_log_stats",
    ),
    ("*optim.min_lr", "write min_lr_ratio, a share of the peak learning rate"),
    ("*optim.clip_grad", "write {owner}grad_clip"),
    (
        "trainer.validation_data_dir",
        "write trainer.rollout_data_dir: validations are kept there too, as val_step_*.parquet",
    ),
    ("trainer.ray_*", _NO_RAY),
    ("ray_*", _NO_RAY),
    ("transfer_queue.*", _NO_RAY),
    *((f"*{name}", _NO_ADAPTERS) for name in ("lora_*", ".lora.*", ".target_modules", ".exclude_modules")),
    *((f"*.{name}.*", _NO_TOOLS) for name in ("multi_turn", "agent")),
    *((f"data.{name}", _NO_TOOLS) for name in ("tool_config_path", "return_full_prompt")),
    *((f"data.{name}", _TEXT_ALONE) for name in ("image_*", "video_*", "return_multi_modal_inputs")),
    ("*freeze_vision_tower", _TEXT_ALONE),
    ("data.custom_cls.*", _NOT + "prepare a file with the columns that docs/data.md names"),
    ("data.datagen.*", _NOT + "prompts come from files alone"),
    ("data.sampler.*", _NOT + "the order follows from data.shuffle and data.seed"),
    ("data.*_max_samples", _NOT + "name a file that holds only the rows that are wanted"),
    ("data.validation_shuffle", _NOT + "validation keeps the order of its files"),
    ("data.gen_batch_size", "write data.train_batch_size: batches for algorithm.filter_groups have that size too"),
    ("data.apply_chat_template_kwargs*", _NOT + "write data.chat_template"),
    ("data.trust_remote_code", "write actor_rollout_ref.model.trust_remote_code"),
    ("data.*_workers", _REMOVE + "rows are read and prompts are encoded asynchronously"),
    ("actor_rollout_ref.model.tokenizer_path", "write data.tokenizer"),
    ("*custom_chat_template", "write data.chat_template"),
    ("*hf_config_path", _NOT + "config.json is in the directory of the weights; override_config replaces its fields"),
    ("*use_shm", _NOT + "models and data are read from where they are"),
    ("*checkpoint.async_save", "write trainer.async_save"),
    ("*checkpoint.*_contents", _NOT + "a checkpoint holds all that a resume needs; see trainer.save_huggingface"),
    ("trainer.max_*_ckpt_to_keep", "write trainer.max_ckpt_to_keep: a checkpoint holds actor and critic"),
    ("trainer.del_local_ckpt_after_load", _NOT + "see trainer.max_ckpt_to_keep"),
    ("trainer.esi_redundant_time", _NOT + "a job that is asked to end saves first; see docs/reliability.md"),
    ("trainer.use_legacy_worker_impl", _REMOVE + "there is one implementation"),
    ("*nccl_timeout", "write trainer.phase_timeout_s"),
    ("*dist_checkpointing*", _REMOVE + "checkpoints are always Megatron-Core's sharded ones"),
    ("*_mbridge", _REMOVE + "Hugging Face weights are read and written directly"),
    (
        "*override_ddp_config*",
        _NOT + "write fields of TransformerConfig in {owner}megatron.override_transformer_config",
    ),
    (
        "*override_mcore_model_config*",
        _NOT + "write fields of TransformerConfig in {owner}megatron.override_transformer_config",
    ),
    ("*megatron.forward_only", _REMOVE + "the model's role decides"),
    ("*optim.lr_wsd_*", _NOT + "warmup_style is constant, cosine or linear"),
    ("*optim.lr_warmup_init", _NOT + "a warm-up begins at 0, and its first step already learns"),
    ("*optim.num_cycles", _NOT + "a cosine schedule is half a period"),
    ("*optim.*weight_decay_incr_style", _NOT + "the weight decay is constant"),
    ("*optim.override_optimizer_config*", _NOT + "the optimizer is AdamW; see the keys of {owner}optim"),
    ("*optim.use_checkpoint_opt_param_scheduler", _NOT + "a resumed run follows its configuration"),
    ("*rollout_n", "write actor_rollout_ref.rollout.n"),
    ("*data_loader_seed", "write data.seed"),
    ("critic.shuffle", "write actor_rollout_ref.actor.shuffle"),
    ("critic.enable", "follows from algorithm.adv_estimator: gae has a critic, and so has custom if it needs values"),
    ("*actor.tau_*", _NOT + "see actor_rollout_ref.actor.policy_loss.loss_mode"),
    ("*loss_scale_factor", "is data.max_response_length, with loss_agg_mode=seq-mean-token-sum-norm"),
    ("*use_prefix_grouper", _NOT + "prompts are computed once for each of their responses"),
    *(
        (f"*{name}", _REMOVE + "entropies are computed a chunk of tokens at a time")
        for name in ("entropy_checkpointing", "entropy_from_logits_with_chunking")
    ),
    ("*sum_pi_squared*", _NOT + "see algorithm.adv_estimator"),
    *(
        (pattern, _NOT + "experts are chosen anew in every forward pass")
        for pattern in ("*router_replay*", "*enable_rollout_routing_replay")
    ),
    ("*tiled_mlp*", _NOT + "write {owner}megatron.sequence_parallel=true, or a larger context_parallel_size"),
    ("*.mtp*", _NOT + "heads that predict several tokens are neither trained nor used"),
    ("*.qat.*", _NOT + "models are trained in bfloat16 or float32"),
    ("actor_rollout_ref.rollout.quantization*", _NOT + "the engine has the actor's weights, in rollout.dtype"),
    ("actor_rollout_ref.rollout.over_sample_rate", _NOT + "see algorithm.filter_groups"),
    ("actor_rollout_ref.rollout.checkpoint_engine.*", _NOT + "see the keys of actor_rollout_ref.rollout.sync"),
    (
        "actor_rollout_ref.rollout.layered_summon",
        _REMOVE + "weights go from shard to shard",
    ),
    ("actor_rollout_ref.rollout.layer_name_map*", _REMOVE + "names of weights follow from the model's family"),
    ("actor_rollout_ref.rollout.multi_stage_wake_up", _REMOVE + "see actor_rollout_ref.rollout.free_cache_engine"),
    ("actor_rollout_ref.rollout.trace.*", _NOT + "see trainer.rollout_data_dir"),
    ("actor_rollout_ref.rollout.skip_*", _NOT + "megarl train --replay learns from responses that were kept"),
    ("actor_rollout_ref.rollout.prometheus.*", _NOT + "metrics go to trainer.logger"),
    *(
        (f"actor_rollout_ref.rollout.{name}", f"write +actor_rollout_ref.rollout.engine_kwargs.{name}")
        for name in ("cudagraph_capture_sizes", "scheduling_policy")
    ),
    ("reward_model.rollout.*", _NOT + "the reward model runs in Megatron-Core, and no engine has it"),
    *(
        (f"reward_model.{name}", _NOT + "the reward model shares the ranks of the trainer")
        for name in ("enable_resource_pool", "n_gpus_per_node", "nnodes")
    ),
    *(
        (pattern, _NOT + "name a Python function in custom_reward_function, or rules in reward_model.weights")
        for pattern in ("reward_manager.*", "reward_model.reward_*", "reward_model.use_reward_loop")
    ),
    ("reward_model.sandbox_fusion.*", _NOT + "rewards run in processes of reward_model.num_workers"),
    ("algorithm.rollout_correction.bypass_mode", _NOT + "the trainer's own log-probabilities are always computed"),
    ("algorithm.rollout_correction.loss_type", "write actor_rollout_ref.actor.policy_loss.loss_mode"),
    ("algorithm.rollout_correction.*_batch_normalize", _NOT + "weights are bounded by rollout_is_threshold"),
    ("algorithm.*pf_ppo*", _NOT + "see algorithm.filter_groups"),
    ("*profiler.*", _NOT + "attach a profiler to a rank; timing_s/* are in the metrics"),
    ("*_target_", _REMOVE + "classes are not chosen by the configuration"),
)
"""(pattern of a path, answer); the first match answers. {owner} is the section of the model concerned."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
FLAGS = {
    "actor.model_name_or_path": "actor_rollout_ref.model.path",
    "pretrain": "actor_rollout_ref.model.path",
    "critic.model_name_or_path": "critic.model.path",
    "critic_pretrain": "critic.model.path",
    "reward.model_name_or_path": "reward_model.model.path",
    "reward_pretrain": "reward_model.model.path",
    "actor.eps_clip": f"{_ACTOR}clip_ratio",
    "eps_clip": f"{_ACTOR}clip_ratio",
    "actor.eps_clip_low_high": f"{_ACTOR}clip_ratio_low and {_ACTOR}clip_ratio_high",
    "actor.dual_clip": f"{_ACTOR}clip_ratio_c",
    "actor.gradient_checkpointing_enable": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_learning_rate": f"{_ACTOR}optim.lr",
    "critic_learning_rate": "critic.optim.lr",
    "critic.value_clip": "critic.cliprange_value",
    "value_clip": "critic.cliprange_value",
    "advantage_estimator": "algorithm.adv_estimator",
    "algo.advantage.gamma": "algorithm.gamma",
    "gamma": "algorithm.gamma",
    "algo.advantage.lambd": "algorithm.lam",
    "lambd": "algorithm.lam",
    "algo.kl.init_coef": "algorithm.kl_ctrl.kl_coef",
    "init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "algo.kl.target": "algorithm.kl_ctrl.target_kl",
    "algo.kl.horizon": "algorithm.kl_ctrl.horizon",
    "ptx_coef": f"{_ACTOR}ptx_coef",
    "pretrain_data": f"{_ACTOR}ptx_files",
    "data.prompt_dataset": "data.train_files",
    "prompt_data": "data.train_files",
    "eval.dataset": "data.val_files",
    "data.input_key": "data.prompt_key",
    "input_key": "data.prompt_key",
    "prompt_max_len": "data.max_prompt_length",
    "generate_max_len": "data.max_response_length",
    "rollout.batch_size": "data.train_batch_size",
    "rollout_batch_size": "data.train_batch_size",
    "n_samples_per_prompt": f"{_ROLLOUT}n",
    "rollout.temperature": f"{_ROLLOUT}temperature",
    "rollout.top_p": f"{_ROLLOUT}top_p",
    "train.batch_size": f"{_ACTOR}ppo_mini_batch_size",
    "train.micro_batch_size": f"{_ACTOR}ppo_micro_batch_size",
    "train.max_tokens_per_gpu": f"{_ACTOR}ppo_max_token_len_per_gpu",
    "train.max_epochs": f"{_ACTOR}ppo_epochs",
    "train.num_episodes": "trainer.total_epochs",
    "train.seed": "data.seed",
    "vllm_tensor_parallel_size": f"{_ROLLOUT}tensor_model_parallel_size",
    "vllm.enforce_eager": f"{_ROLLOUT}enforce_eager",
    "vllm.enable_prefix_caching": f"{_ROLLOUT}enable_prefix_caching",
    "ckpt.output_dir": "trainer.default_local_dir",
    "save_path": "trainer.default_local_dir",
    "ckpt.save_steps": "trainer.save_freq",
    "save_steps": "trainer.save_freq",
    "ckpt.max_num": "trainer.max_ckpt_to_keep",
    "ckpt.save_hf": "trainer.save_huggingface",
    "eval.steps": "trainer.test_freq",
    "logger.wandb.project": "trainer.project_name, with wandb in trainer.logger",
    "logger.wandb.key": "wandb in trainer.logger, and the key in the environment as WANDB_API_KEY",
    "use_wandb": "wandb in trainer.logger, and the key in the environment as WANDB_API_KEY",
    "logger.tensorboard_dir": "tensorboard in trainer.logger",
    "use_tensorboard": "tensorboard in trainer.logger",
    "zero_stage": f"{_ACTOR}megatron.use_distributed_optimizer",
    "ds.zero_stage": f"{_ACTOR}megatron.use_distributed_optimizer",
    "ds.tensor_parallel_size": f"{_ACTOR}megatron.tensor_model_parallel_size",
    "ds.ring_attn_size": f"{_ACTOR}megatron.context_parallel_size",
}
"""Flags of trainers with an argument parser -> the key that does the same here."""

FOREIGN_VALUES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "*rollout.load_format",
        ("dummy", "dummy_dtensor", "dummy_hf", "dtensor", "hf", "safetensors"),
        "the weights come from Megatron's shards, so {value} does not apply: write dummy_megatron",
    ),
    (
        "*rollout.dtype",
        ("float16", "half", "auto"),
        "{value} is not a type the actor trains in: write bfloat16 or float32",
    ),
    (
        "trainer.logger",
        ("swanlab", "clearml", "trackio", "vemlp_wandb", "rerun"),
        "{value} is not supported: write wandb, mlflow, tensorboard, jsonl or console",
    ),
)
"""(pattern of a path, values, answer)."""


def alias(path: str) -> str:
    """Return `path` with an alias at its end replaced by the name here."""
    parent, dot, name = path.rpartition(".")
    return f"{parent}{dot}{ALIASES.get(name, name)}"


def answer_key(path: str) -> str | None:
    """Return what to write instead of the key `path`, or None if the key is not known from another trainer."""
    if path in FLAGS:
        return f"write {FLAGS[path]}"
    for pattern, answer in FOREIGN_KEYS:
        if fnmatchcase(path, pattern):
            return answer.format(owner=owner_of(path))
    return None


def answer_values(path: str, value: object) -> Iterator[str]:
    """Yield what to write instead of each foreign value at `path`; a list is checked item by item."""
    for item in value if isinstance(value, list) else [value]:
        for pattern, values, answer in FOREIGN_VALUES:
            if fnmatchcase(path, pattern) and item in values:
                yield answer.format(owner=owner_of(path), value=item)


def owner_of(path: str) -> str:
    """Return the section of the model that `path` belongs to, with a dot; empty if there is none."""
    for owner in ("actor_rollout_ref.ref.", "critic.", "reward_model."):
        if path.startswith(owner):
            return owner
    return "actor_rollout_ref.actor." if path.startswith("actor_rollout_ref.") else ""
