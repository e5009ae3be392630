"""Keys of other trainers: dropped if their value asks for nothing, answered if not, never mistaken for another key."""

import re
from collections.abc import Sequence

import pytest

from megarl.commands.convert.__main__ import convert
from megarl.config.faults import ConfigError, Fault
from megarl.config.foreign import ANY, DEFAULTS, FIXED, FLAGS, KEYS, RENAMES, VALUES, ForeignRow
from megarl.config.links import shown
from megarl.config.load import foreign_keys, load_config, load_sft_config, to_yaml
from megarl.config.report import start_notes, unwritten_keys
from megarl.config.root import Config, SFTConfig
from megarl.config.schema import Schema

RC = "algorithm.rollout_correction"
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
        hf_config_path tokenizer_path custom_chat_template lora.type mtp.method
        mtp.num_speculative_tokens tiled_mlp.num_shards
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
    "algorithm": "pf_ppo.weight_pow rollout_correction.loss_type",
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
    written = [f"{key}=something" for key in keys]
    found = {fault.path: fault for fault in faults(*written)}
    accepted = {remark.written: remark.key for remark in foreign_keys(Config, written)}
    answered = {key: fault for key, fault in found.items() if key not in accepted.values()}
    assert answered.keys() | accepted.keys() == set(keys) and not answered.keys() & accepted.keys()
    for key, fault in answered.items():
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
        ("actor_rollout_ref.model.lora.type=dora", "not supported: adapters are those of LoRA, write lora"),
        ("trainer.logger=[clearml]", "clearml is not supported: write wandb, mlflow, tensorboard"),
    ],
)
def test_what_is_not_there_is_called_not_supported(key: str, answer: str) -> None:
    (fault,) = faults(key)
    assert answer in fault.message


def example(pattern: str) -> str:
    return pattern.replace("*", "actor_rollout_ref.model.").replace("..", ".")


@pytest.mark.parametrize(("pattern", "row"), [(pattern, row) for row in FIXED for pattern in row.keys], ids=str)
def test_fixed_key_accepts_only_its_value(pattern: str, row: ForeignRow) -> None:
    key = example(pattern)
    plain = load_config(MINIMAL, world_size=None, check_paths=False)
    anything = [1024 if row.unless else 1_000_000, "something"] if ANY in row.accepts else []
    for value in (*(one for one in row.accepts if one != ANY), *anything, "${data.seed}"):
        written = [*MINIMAL, f"{key}={shown(value)}"]
        assert load_config(written, world_size=None, check_paths=False) == plain
        assert any(key in note for note in start_notes(plain, written))
    is_renamed = any(one.matches(key) for one in RENAMES)
    for other in ("7", "something") if not (anything or is_renamed) else ():
        (fault,) = faults(f"{key}={other}")
        assert fault.path == key and "unknown key" not in fault.message and "{" not in fault.message
    assert key not in Schema.of(Config).leaves


RENAMED = [
    ("actor_rollout_ref.actor.fsdp_config.param_offload=true", "actor_rollout_ref.actor.megatron.param_offload=true"),
    ("critic.model.fsdp_config.optimizer_offload=true", "critic.megatron.optimizer_offload=true"),
    ("reward_model.model.fsdp_config.param_offload=true", "reward_model.megatron.param_offload=true"),
    ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "actor_rollout_ref.ref.megatron.param_offload=true"),
    ("actor_rollout_ref.actor.optim.clip_grad=0.5", "actor_rollout_ref.actor.grad_clip=0.5"),
    (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
    ),
    (
        "actor_rollout_ref.actor.veomni.ulysses_parallel_size=2",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
    ),
    ("actor_rollout_ref.actor.veomni.param_offload=true", "actor_rollout_ref.actor.megatron.param_offload=true"),
    (
        "actor_rollout_ref.actor.automodel.tp_size=2",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    ),
    ("reward.reward_kwargs.overlong_buffer_cfg.len=128", "algorithm.overlong_buffer.len=128"),
    ("reward_model.overlong_buffer.penalty_factor=0.5", "algorithm.overlong_buffer.penalty_factor=0.5"),
    ("actor_rollout_ref.actor.k_percent=0.04", "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.0004"),
    ("actor_rollout_ref.actor.clip_cov_lb=2.0", "actor_rollout_ref.actor.policy_loss.clip_cov_lb=2.0"),
    ("actor_rollout_ref.rollout.load_format=safetensors", "actor_rollout_ref.rollout.load_format=dummy_megatron"),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "actor_rollout_ref.actor.optim.lr_warmup_steps=null"),
    ("actor_rollout_ref.actor.clip_ratio_low=10", "actor_rollout_ref.actor.clip_ratio_low=1.0"),
    ("actor_rollout_ref.actor.kl_loss_type=mse+", "actor_rollout_ref.actor.kl_loss_type=mse"),
    ("algorithm.kl_penalty=k2+", "algorithm.kl_penalty=k2"),
    ("trainer.logger=[console,file]", "trainer.logger=[console,jsonl]"),
    ("trainer.logger=[jsonl,swanlab]", "trainer.logger=[jsonl,mlflow]"),
    ("trainer.logger=[swanlab,mlflow]", "trainer.logger=[mlflow]"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=gmpo", "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"),
    ("actor_rollout_ref.actor.tau_neg=1.2", "actor_rollout_ref.actor.policy_loss.tau_neg=1.2"),
    (
        "actor_rollout_ref.model.lora.target_modules=[linear_q,linear_fc1_up]",
        "actor_rollout_ref.model.target_modules=[q_proj,up_proj]",
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), RENAMED)
def test_renamed_key_trains_as_ours_and_is_told(theirs: str, ours: str) -> None:
    common = [*MINIMAL, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.max_num_batched_tokens=8192"]
    config = load_config([*common, theirs], world_size=None, check_paths=False)
    assert config == load_config([*common, ours], world_size=None, check_paths=False)
    assert config != load_config(common, world_size=None, check_paths=False) or "load_format" in ours or "null" in ours
    assert any(theirs.partition("=")[0] in note for note in start_notes(config, [*common, theirs]))


@pytest.mark.parametrize(
    ("written", "note"),
    [
        ("actor_rollout_ref.actor.strategy=fsdp2", "a rank holds a complete model"),
        ("actor_rollout_ref.actor.model_engine=torchtitan", "a rank holds a complete model"),
        ("model_engine=veomni", "a rank holds a complete model"),
        ("critic.strategy=automodel", "partitioned as the actor is"),
        ("actor_rollout_ref.actor.veomni.moe_implementation=fused", "another engine of the trained models"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", "with a copy in float32"),
        ("actor_rollout_ref.actor.megatron.use_megatron_fsdp=true", "actor.megatron.param_offload"),
        ("actor_rollout_ref.rollout.name=sglang", "the engine is vLLM"),
        ("actor_rollout_ref.rollout.data_parallel_size=8", "further replicas"),
        ("actor_rollout_ref.rollout.expert_parallel_size=8", "enable_expert_parallel=true"),
        ("data.use_shm=true", "read from where they are"),
    ],
)
def test_other_engine_of_same_function_is_noted(written: str, note: str) -> None:
    config = load_config([*MINIMAL, written], world_size=None, check_paths=False)
    assert config == load_config(MINIMAL, world_size=None, check_paths=False)
    assert any(written in one and note in one for one in start_notes(config, [*MINIMAL, written]))


def test_bounds_of_engine_ratio_are_turned_round() -> None:
    """verl bounds rollout/train from 0.5 to 4, which is train/rollout from 0.25 to 2."""
    correction = "algorithm.rollout_correction"
    argv = [*MINIMAL, f"{correction}.rollout_rs=token_k1", f"{correction}.rollout_rs_threshold=0.5_4.0"]
    found = load_config(argv, world_size=None, check_paths=False).algorithm.rollout_correction
    assert (found.rollout_rs, found.rollout_rs_threshold_lower, found.rollout_rs_threshold) == ("token", 0.25, 2.0)


@pytest.mark.parametrize(("written", "bounds"), [("0.5_5.0", (0.5, 5.0)), ("'3'", (None, 3.0))])
def test_bounds_of_weights_stay_as_they_are(written: str, bounds: tuple[float | None, float]) -> None:
    """verl's weights are train/rollout, as here."""
    correction = "algorithm.rollout_correction"
    argv = [*MINIMAL, f"{correction}.rollout_is=token", f"{correction}.rollout_is_threshold={written}"]
    found = load_config(argv, world_size=None, check_paths=False).algorithm.rollout_correction
    assert (found.rollout_is_threshold_lower, found.rollout_is_threshold) == bounds


def test_no_bound_of_no_weight_is_accepted() -> None:
    """verl's weights are off without a bound, whatever `rollout_is` says."""
    section = f"{RC}={{rollout_is_threshold: null, rollout_rs: token, rollout_rs_threshold: 2}}"
    load_config([*MINIMAL, section], world_size=None, check_paths=False)
    found, _ = convert(f"main_ppo {' '.join(MINIMAL)} {RC}.rollout_is=token {RC}.rollout_is_threshold=null")
    assert any("rollout_is=null" in why for why in found.decisions.values())


def test_arguments_of_vllm_may_stand_below_its_name() -> None:
    kwargs = "actor_rollout_ref.rollout.engine_kwargs"
    found = load_config([*MINIMAL, f"+{kwargs}.vllm.disable_log_stats=true"], world_size=None, check_paths=False)
    assert found == load_config([*MINIMAL, f"+{kwargs}.disable_log_stats=true"], world_size=None, check_paths=False)


def test_room_of_engine_must_suffice() -> None:
    lengths = ("data.max_prompt_length=100", "data.max_response_length=200")
    assert faults(*lengths, "actor_rollout_ref.rollout.max_model_len=300") == []
    (fault,) = faults(*lengths, "actor_rollout_ref.rollout.max_model_len=299")
    assert "= 300" in fault.message


def test_batch_of_dynamic_sampling_needs_dynamic_sampling() -> None:
    """verl trains on gen_batch_size prompts unless it filters them."""
    words = ("data.train_batch_size=1024", "data.gen_batch_size=3072")
    (fault,) = faults(*words)
    assert fault.path == "data.gen_batch_size" and "data.train_batch_size=1024" in fault.message
    assert not faults("data.train_batch_size=1024", "data.gen_batch_size=1024")
    differing = (*words, "algorithm.filter_groups.enable=true", "algorithm.adv_estimator=grpo")
    assert not faults(*differing, "actor_rollout_ref.rollout.n=4")


@pytest.mark.parametrize(
    "options",
    [["--config-name=ppo_megatron_trainer"], ["--config-path=config", "-cn", "ppo_trainer.yaml"], ["hydra.run.dir=x"]],
)
def test_files_of_verl_are_no_files_of_ours(options: list[str]) -> None:
    argv = [*MINIMAL, *options]
    config = load_config(argv, world_size=None, check_paths=False)
    assert config == load_config(MINIMAL, world_size=None, check_paths=False)
    assert any(options[-1].partition("=")[0].lstrip("-")[:5] in note for note in start_notes(config, argv))


def test_file_of_hydra_is_asked_for_as_argument() -> None:
    (fault,) = faults("--config-name", "mine")
    assert "megarl train mine.yaml" in fault.message


def test_defaults_of_verl_are_reported() -> None:
    config = load_config(MINIMAL, world_size=None, check_paths=False)
    assert len(list(unwritten_keys(config, MINIMAL))) == 1
    first, *_ = unwritten_keys(config, [*MINIMAL, "actor_rollout_ref.rollout.mode=async"])
    assert "actor_rollout_ref.actor.entropy_coeff=0.001 (verl: 0)" in first
    assert "algorithm.kl_ctrl.kl_coef=0.005 (verl: 0.001)" in first and "ppo_kl_coef" not in first
    written = [*MINIMAL, "model_engine=megatron", *(f"{key}={shown(value)}" for key, value in DEFAULTS.items())]
    assert not list(unwritten_keys(load_config(written, world_size=None, check_paths=False), written))


def said_of_alpha(config: Config | SFTConfig, argv: Sequence[str]) -> list[str]:
    return [note for note in start_notes(config, argv) if "lora_alpha=" in note]


@pytest.mark.parametrize("model", ["actor_rollout_ref.model", "critic.model"])
def test_nested_rank_has_another_default_alpha(model: str) -> None:
    """verl's `lora_alpha` is 16, and its `lora.alpha` 32."""
    for rank, other, is_said in [
        ("lora.rank=4", "data.seed=1", True),
        ("lora.rank=4", f"{model}.lora.alpha=8", False),
        ("lora.rank=4", f"{model}.lora_alpha=16", False),
        ("lora.rank=0", "data.seed=1", False),
        ("lora_rank=4", f"{model}.lora.type=lora", False),
    ]:
        argv = [*MINIMAL, f"{model}.{rank}", other]
        found = said_of_alpha(load_config(argv, world_size=None, check_paths=False), argv)
        assert len(found) == is_said, argv
        assert all(f"{model}.lora_alpha=16 (verl: 32)" in note for note in found)


def test_nested_adapters_are_read_in_supervised_runs() -> None:
    argv = ["data.train_files=a", "model.path=org/m", "model.lora.rank=4", "model.lora.target_modules=[linear_q]"]
    config = load_sft_config(argv, world_size=None, check_paths=False)
    assert (config.model.lora_rank, config.model.target_modules) == (4, ["q_proj"])
    [note] = said_of_alpha(config, argv)
    assert "model.lora_alpha=16 (verl: 32)" in note and "entropy" not in note


def test_tables_name_keys_that_exist() -> None:
    leaves = Schema.of(Config).leaves | Schema.of(SFTConfig).leaves
    assert DEFAULTS.keys() <= leaves.keys()
    assert {key for row in FIXED for key in row.least} <= leaves.keys()
    for row in RENAMES:
        assert all(row.target(example(key)) in leaves or "{rest}" in row.to for key in row.keys), row.to
        assert row.defaults.keys() | row.also.keys() <= leaves.keys()
    assert not [row for row in VALUES if not (row.refuses or row.becomes or row.most)]


def test_fixed_key_is_accepted_in_supervised_runs() -> None:
    argv = ["data.train_files=a", "model.path=org/m", "model.use_remove_padding=true", "model.lora_rank=0"]
    assert "use_remove_padding" not in to_yaml(load_sft_config(argv, world_size=None, check_paths=False))


@pytest.mark.parametrize("flag", FLAGS)
def test_argument_parser_flag_is_answered_with_our_key(flag: str) -> None:
    keys = re.findall(r"[a-z_]+\.[a-z_.]+", FLAGS[flag])
    assert set(keys) <= Schema.of(Config).leaves.keys()
    spelt = faults(f"--{flag}", f"{flag.replace('_', '-')}=1") if "." not in flag else faults(f"--{flag}")
    assert FLAGS[flag] in spelt[0].message


def test_validation_keys_of_forks_sample() -> None:
    rollout = "actor_rollout_ref.rollout"
    argv = [*MINIMAL, "data.val_files=val.parquet", f"{rollout}.n_val=8", f"{rollout}.val_temperature=0.6"]
    config = load_config(argv, world_size=None, check_paths=False)
    own = config.actor_rollout_ref.rollout.val_kwargs
    assert (own.n, own.temperature, own.do_sample) == (8, 0.6, True)
    assert any("val_kwargs.do_sample is true" in note for note in start_notes(config, argv))


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
