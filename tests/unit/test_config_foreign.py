"""Keys of other trainers: dropped if their value asks for nothing, answered if not, never mistaken for another key."""

import re

import pytest

from megarl.config.faults import ConfigError, Fault
from megarl.config.foreign import FIXED, FLAGS, KEYS
from megarl.config.load import load_config, load_sft_config, to_yaml
from megarl.config.root import Config
from megarl.config.schema import Schema

MINIMAL = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic")

PEERS = {
    "actor_rollout_ref.actor": """
        optim.lr_warmup_init optim.lr_wsd_decay_style optim.lr_wsd_decay_steps optim.weight_decay_incr_style
        optim.override_optimizer_config optim.use_checkpoint_opt_param_scheduler optim.num_cycles optim.min_lr
        megatron.use_dist_checkpointing megatron.dist_checkpointing_path megatron.override_ddp_config
        megatron.override_mcore_model_config megatron.use_mbridge megatron.vanilla_mbridge rollout_n tau_pos tau_neg
        loss_scale_factor data_loader_seed checkpoint.save_contents checkpoint.load_contents checkpoint.async_save
        router_replay.mode router_replay.replay_file profiler.tool profiler.save_path fsdp_config.fsdp_size
        fsdp_config.param_offload fsdp_config.wrap_policy.min_num_params entropy_checkpointing
        entropy_from_logits_with_chunking calculate_sum_pi_squared qat.mode _target_""",
    "actor_rollout_ref.ref": "rollout_n log_prob_use_dynamic_bsz router_replay.mode profiler.ranks",
    "actor_rollout_ref.rollout": """
        cudagraph_capture_sizes max_model_len enable_chunked_prefill scheduling_policy over_sample_rate
        multi_stage_wake_up multi_turn.max_assistant_turns multi_turn.format multi_turn.tool_config_path
        agent.num_workers agent.default_agent_loop agent.custom_async_server.path checkpoint_engine.backend
        checkpoint_engine.engine_kwargs trace.backend skip_dump_dir enable_rollout_routing_replay prometheus.enable
        prometheus.port quantization quantization_config_file mtp layer_name_map.qkv_layer_name layered_summon""",
    "actor_rollout_ref": "nccl_timeout",
    "actor_rollout_ref.model": """
        hf_config_path tokenizer_path custom_chat_template lora_alpha lora_adapter_path target_modules exclude_modules
        lora.type lora.dtype lora.alpha mtp.method mtp.num_speculative_tokens tiled_mlp.num_shards
        fused_kernel_options.impl_backend""",
    "data": """
        train_max_samples val_max_samples tool_config_path dataloader_num_workers image_patch_size image_key video_key
        filter_overlong_prompts_workers trust_remote_code custom_cls.path custom_cls.name return_multi_modal_inputs
        sampler.class_path datagen.name gen_batch_size""",
    "critic": """
        optim.lr_warmup_init checkpoint.save_contents shuffle enable data_loader_seed rollout_n model.lora.dtype
        nccl_timeout ppo_max_token_len_per_gpu""",
    "reward_model": """
        n_gpus_per_node nnodes reward_loop_source use_reward_loop sandbox_fusion.url nccl_timeout rollout.name
        rollout.dtype forward_max_token_len_per_gpu""",
    "reward_manager": "source name module.path",
    "algorithm": "pf_ppo.weight_pow rollout_correction.loss_type rollout_correction.rollout_is_batch_normalize",
    "trainer": """
        esi_redundant_time max_actor_ckpt_to_keep max_critic_ckpt_to_keep ray_wait_register_center_timeout
        use_legacy_worker_impl validation_data_dir""",
    "global_profiler": "tool steps global_tool_config.nsys.discrete",
    "ray_kwargs": "ray_init.num_cpus timeline_json_file",
}
"""Names of keys that users of other trainers have in their files, by section."""


def faults(*arguments: str) -> list[Fault]:
    try:
        load_config([*MINIMAL, *arguments], world_size=None, check_paths=False)
    except ConfigError as error:
        return list(error.faults)
    return []


@pytest.mark.parametrize("section", PEERS)
def test_foreign_key_gets_answer_instead_of_unknown_key(section: str) -> None:
    keys = [f"{section}.{name}" for name in PEERS[section].split()]
    found = {fault.path: fault for fault in faults(*(f"{key}=something" for key in keys))}
    assert found.keys() == set(keys)
    for key, fault in found.items():
        assert "unknown key" not in fault.message and fault.about is None, key
        assert re.search(
            "write |remove it|not supported|see |is decided|follows from|FSDP|has the actor's|is ", fault.message
        )


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        (
            "actor_rollout_ref.rollout.multi_turn.enable=true",
            "not supported: environment.name gives responses further turns",
        ),
        ("data.custom_cls.path=mine.py", "not supported: prepare a file"),
        ("data.image_key=images", "not supported: prompts and responses are text"),
        ("actor_rollout_ref.rollout.quantization=fp8", "not supported: the engine has the actor's weights"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model]", "see trainer.save_huggingface"),
        ("actor_rollout_ref.model.lora_rank=8", "not supported: adapters"),
        ("trainer.logger=[swanlab]", "swanlab is not supported: write wandb, mlflow, tensorboard"),
    ],
)
def test_what_is_not_there_is_called_not_supported(key: str, answer: str) -> None:
    (fault,) = faults(key)
    assert answer in fault.message


def example(pattern: str) -> str:
    return pattern.replace("*", "actor_rollout_ref.model.").replace("..", ".")


@pytest.mark.parametrize(
    ("pattern", "accepted"), [(pattern, row.accepts) for row in FIXED for pattern in row.keys], ids=str
)
def test_fixed_key_accepts_only_its_value(pattern: str, accepted: list[object]) -> None:
    key = example(pattern)
    plain = load_config(MINIMAL, world_size=None, check_paths=False)
    for value in (*accepted, "${data.seed}"):
        assert load_config([*MINIMAL, f"{key}={value}"], world_size=None, check_paths=False) == plain
    for other in ("7", "something"):
        (fault,) = faults(f"{key}={other}")
        assert fault.path == key and "unknown key" not in fault.message and "{" not in fault.message
    assert key not in Schema.of(Config).leaves


def test_fixed_key_is_accepted_in_supervised_runs() -> None:
    argv = ["data.train_files=a", "model.path=org/m", "model.use_remove_padding=true", "model.lora_rank=0"]
    assert "use_remove_padding" not in to_yaml(load_sft_config(argv, world_size=None, check_paths=False))


@pytest.mark.parametrize("flag", FLAGS)
def test_argument_parser_flag_is_answered_with_our_key(flag: str) -> None:
    keys = re.findall(r"[a-z_]+\.[a-z_.]+", FLAGS[flag])
    assert set(keys) <= Schema.of(Config).leaves.keys()
    spelt = faults(f"--{flag}", f"{flag.replace('_', '-')}=1") if "." not in flag else faults(f"--{flag}")
    assert FLAGS[flag] in spelt[0].message


def test_no_row_of_foreign_keys_is_shadowed() -> None:
    patterns = [pattern for row in KEYS for pattern in row.keys]
    assert len(patterns) == len(set(patterns))


COMMAND = """data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=256
    data.val_batch_size=1312 data.max_prompt_length=256 data.max_response_length=1024
    actor_rollout_ref.model.path=org/base actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_micro_batch_size=8 actor_rollout_ref.rollout.log_prob_micro_batch_size=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.ref.log_prob_micro_batch_size=4 critic.optim.lr=1e-5 critic.model.path=org/base
    critic.ppo_micro_batch_size=8 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=['wandb']
    trainer.val_before_train=False trainer.default_hdfs_dir=null trainer.n_gpus_per_node=2 trainer.nnodes=1
    trainer.save_freq=100 trainer.test_freq=100 trainer.project_name=TinyZero trainer.experiment_name=countdown-3b
    trainer.total_epochs=15"""
"""The command line of the well-known small script, to the letter."""


def test_small_script_command_is_accepted() -> None:
    config = load_config(COMMAND.split(), world_size=2, check_paths=False)
    policy = config.actor_rollout_ref
    assert config.trainer.logger == ["wandb"]
    assert (policy.rollout.tensor_model_parallel_size, policy.rollout.gpu_memory_utilization) == (2, 0.4)
    assert (policy.rollout.response_length, policy.ref.log_prob_micro_batch_size) == (1024, 4)
    assert (config.critic.optim.lr, config.algorithm.kl_ctrl.kl_coef) == (1e-5, 0.001)
    assert config.algorithm.use_kl_in_reward is True and not config.trainer.val_before_train
    assert config.trainer.default_local_dir == "checkpoints/TinyZero/countdown-3b"
