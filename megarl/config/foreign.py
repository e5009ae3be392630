"""Keys and values that users bring from trainers with other backends: other spellings, and our equivalents.

An alias is read as our own name for the same thing. Anything else gets a fault that says what to write instead.
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
}
"""The last part of a path in other versions of the vocabulary -> ours."""

_MEGATRON_KEY = "belongs to FSDP; models are partitioned by Megatron-Core: write {owner}megatron."
_REMOVE = "remove it: "
_ONE_BUDGET = "is decided for all models at once: write actor_rollout_ref.actor.use_dynamic_bsz"
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
    ("*use_liger", _REMOVE + "fused kernels are chosen by themselves (see python -m megarl.doctor)"),
    ("*use_fused_kernels", _REMOVE + "fused kernels are chosen by themselves (see python -m megarl.doctor)"),
    ("*use_torch_compile", _REMOVE + "models run Megatron-Core's kernels, uncompiled"),
    ("*enable_activation_offload", "write enable_gradient_checkpointing=true in the model's section"),
    ("*log_prob_use_dynamic_bsz", _ONE_BUDGET),
    ("critic.use_dynamic_bsz", _ONE_BUDGET),
    ("reward_model.use_dynamic_bsz", _ONE_BUDGET),
    (
        "critic.*max_token_len_per_gpu",
        "the critic has the actor's token budget: write actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ),
    ("reward_model.strategy", _REMOVE + "the reward model is partitioned by Megatron-Core, as all models are"),
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
    ("actor_rollout_ref.rollout.mode", _REMOVE + "the engine lives in the trainer's processes and works in step"),
    (
        "reward_model.reward_manager",
        _REMOVE + "the row's data source, custom_reward_function or reward_model.weights say what is called",
    ),
    (
        "reward_model.launch_reward_fn_async",
        _REMOVE + "responses are always scored while the engine goes on with others",
    ),
    ("*optim.min_lr", "write min_lr_ratio, a share of the peak learning rate"),
    ("*optim.clip_grad", "write {owner}grad_clip"),
    (
        "trainer.validation_data_dir",
        "write trainer.rollout_data_dir: validations are kept there too, as val_step_*.parquet",
    ),
    ("*lora_*", "adapters are not supported: all parameters are trained"),
    ("trainer.ray_*", _NO_RAY),
    ("ray_*", _NO_RAY),
)
"""(pattern of a path, answer); the first match answers. {owner} is the section of the model concerned."""

FOREIGN_VALUES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "*strategy",
        ("fsdp", "fsdp2"),
        "models are partitioned by Megatron-Core, not {value}: write megatron, and cut the model by "
        "{owner}megatron.tensor_model_parallel_size and {owner}megatron.pipeline_model_parallel_size",
    ),
    ("*rollout.name", ("sglang", "hf", "trtllm"), "the engine is vLLM, not {value}: write vllm"),
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
        ("wandb", "swanlab", "tensorboard", "clearml", "trackio"),
        "{value} is not available: write mlflow (metrics, parameters and tables), jsonl or console",
    ),
    ("*hybrid_engine", (False,), "trainer and engine always share their processes: write true"),
    ("*use_remove_padding", (False,), "micro-batches are always packed: write true"),
)
"""(pattern of a path, values, answer)."""


def alias(path: str) -> str:
    """Return `path` by our own name if it ends in an alias, else as it is."""
    parent, dot, name = path.rpartition(".")
    return f"{parent}{dot}{ALIASES.get(name, name)}"


def answer_key(path: str) -> str | None:
    """Return what to write instead of the key `path`, or None if it is not known as a foreign one."""
    for pattern, answer in FOREIGN_KEYS:
        if fnmatchcase(path, pattern):
            return answer.format(owner=_owner(path))
    return None


def answer_values(path: str, value: object) -> Iterator[str]:
    """Yield what to write instead of each foreign value at `path`; a list is judged item by item."""
    for item in value if isinstance(value, list) else [value]:
        for pattern, values, answer in FOREIGN_VALUES:
            if fnmatchcase(path, pattern) and item in values:
                yield answer.format(owner=_owner(path), value=item)


def _owner(path: str) -> str:
    for owner in ("actor_rollout_ref.ref.", "critic.", "reward_model."):
        if path.startswith(owner):
            return owner
    return "actor_rollout_ref.actor." if path.startswith("actor_rollout_ref.") else ""
