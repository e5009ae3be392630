"""Keys without a choice: one value is what megarl does anyway, and any other value asks for a missing feature.

Such a key is accepted with its one value and dropped, so that no section has a field that nothing reads. A value that
follows another key (`${...}`) is accepted: the other key is checked itself.
"""

from fnmatch import fnmatchcase
from typing import Any

from megarl.config.foreign import answer_key, owner_of

_BACKEND = (
    "models are partitioned by Megatron-Core, not {value}: write megatron, and cut the model by "
    "{owner}megatron.tensor_model_parallel_size and {owner}megatron.pipeline_model_parallel_size"
)
_REPLICA = "an engine replica is tensor-parallel, and the other ranks are further replicas: write 1"

FIXED: tuple[tuple[str, tuple[Any, ...], str | None], ...] = (
    ("actor_rollout_ref.hybrid_engine", (True,), "trainer and engine always share their processes: write true"),
    ("*use_remove_padding", (True,), "micro-batches are always packed: write true"),
    *(
        (f"{model}.strategy", ("megatron",), _BACKEND)
        for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
    ),
    ("actor_rollout_ref.rollout.name", ("vllm",), "the engine is vLLM, not {value}: write vllm"),
    (
        "actor_rollout_ref.rollout.mode",
        ("sync",),
        "the engine lives in the trainer's processes and works in step: write sync",
    ),
    *(
        (f"actor_rollout_ref.rollout.{name}", (1,), _REPLICA)
        for name in ("data_parallel_size", "pipeline_model_parallel_size")
    ),
    (
        "actor_rollout_ref.rollout.expert_parallel_size",
        (1,),
        "experts are spread over a replica by +actor_rollout_ref.rollout.engine_kwargs.enable_expert_parallel=true",
    ),
    (
        "actor_rollout_ref.rollout.logprobs_mode",
        ("processed_logprobs",),
        "log-probabilities are those of the distribution that is sampled from: write processed_logprobs",
    ),
    ("actor_rollout_ref.rollout.skip_tokenizer_init", (True,), "the engine works on token ids: write true"),
    ("*load_weight", (True,), "models start from their checkpoints: write true"),
    ("*calculate_entropy", (True,), "the entropy is always in the metrics: write true"),
    ("*optim.optimizer", ("adam", "adamw", "AdamW"), "the optimizer is AdamW: write adam"),
    ("*optim.optimizer_impl", ("torch.optim",), "the optimizer is Megatron-Core's AdamW: remove it"),
    (
        "reward_model.reward_manager",
        ("naive", "batch"),
        "the row's data source, custom_reward_function or reward_model.weights say what is called: write naive, or "
        "batch with a function that takes lists",
    ),
    (
        "reward_model.launch_reward_fn_async",
        (True,),
        "responses are always scored while the engine generates others: write true",
    ),
    ("*ulysses_sequence_parallel_size", (1,), None),
    ("*lora_rank", (0,), None),
    ("*lora.rank", (0,), None),
    *(
        (f"*.{name}", (False,), None)
        for name in (
            *("multi_turn.enable", "mtp.enable", "mtp.enable_train", "mtp.enable_rollout", "profiler.enable"),
            *("use_liger", "use_fused_kernels", "use_torch_compile", "enable_activation_offload", "use_shm"),
            *("use_prefix_grouper", "freeze_vision_tower", "tiled_mlp.enabled", "megatron.forward_only"),
        )
    ),
    *(
        (name, (False,), None)
        for name in (
            *("data.return_full_prompt", "data.validation_shuffle", "actor_rollout_ref.rollout.skip_rollout"),
            *("algorithm.use_pf_ppo", "algorithm.rollout_correction.bypass_mode", "reward_model.enable_resource_pool"),
            *("trainer.del_local_ckpt_after_load", "transfer_queue.enable"),
        )
    ),
)
"""(pattern of a path, accepted values, reason why no other value is accepted); None: the reason in FOREIGN_KEYS."""


def is_fixed(path: str) -> bool:
    """Tell whether the key at `path` has no choice."""
    return any(fnmatchcase(path, pattern) for pattern, _, _ in FIXED)


def refuse(path: str, value: object) -> str | None:
    """Return why the key at `path`, which has no choice, cannot be `value`; None if `value` is accepted."""
    _, accepted, why = next(row for row in FIXED if fnmatchcase(path, row[0]))
    if any(value == one and type(value) is type(one) for one in accepted):
        return None
    if isinstance(value, str) and value.startswith("${"):
        return None
    if why is None:
        return answer_key(path) or f"is not supported: write {str(accepted[0]).lower()}"
    return why.format(owner=owner_of(path), value=value)
