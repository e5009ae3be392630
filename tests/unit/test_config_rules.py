"""Test the rules between sections: sizes that divide, files that exist, keys that belong together."""

from pathlib import Path

import pytest

from megarl.config.load import load_config
from tests.support.configs import ACTOR, ROLLOUT, TP, faults, make_model, sound_arguments

PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
CP = "context_parallel_size"
EP = "expert_model_parallel_size"
OVERRIDE = f"{ACTOR}.megatron.override_transformer_config"
FIRST, LAST = f"{OVERRIDE}.num_layers_in_first_pipeline_stage", f"{OVERRIDE}.num_layers_in_last_pipeline_stage"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return sound_arguments(tmp_path)


def test_a_sound_configuration_has_no_fault(argv: list[str]) -> None:
    assert faults(argv) == {}
    assert faults(argv, world_size=8) == {}
    assert faults(argv, f"{ACTOR}.megatron.{TP}=4", f"{ACTOR}.megatron.{PP}=2", f"{ROLLOUT}.{TP}=2") == {}


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        ([f"{ACTOR}.megatron.{TP}=3"], f"{ACTOR}.megatron.{TP}", "3 does not divide the world of 8 ranks"),
        ([f"{ACTOR}.megatron.{TP}=4", f"{ACTOR}.megatron.{PP}=3"], f"{ACTOR}.megatron.{TP}", "4 x pipeline 3 = 12"),
        ([f"{ROLLOUT}.{TP}=3"], f"{ROLLOUT}.{TP}", "3 does not divide the world of 8 ranks"),
        ([f"{ROLLOUT}.{TP}=8"], f"{ROLLOUT}.{TP}", "8 does not divide the 12 attention heads"),
        ([f"{ACTOR}.megatron.{PP}=4"], f"{ACTOR}.megatron.{PP}", "4 does not divide the 6 layers"),
        ([f"critic.megatron.{TP}=2"], f"critic.megatron.{TP}", "one mesh serves all models"),
        ([f"actor_rollout_ref.ref.megatron.{PP}=2"], f"actor_rollout_ref.ref.megatron.{PP}", "follows the actor's"),
        ([f"critic.megatron.{CP}=2"], f"critic.megatron.{CP}", "one mesh serves all models"),
        ([f"{ACTOR}.megatron.{CP}=3"], f"{ACTOR}.megatron.{TP}", "pipeline 1 x context 3 = 3 does not divide"),
        ([f"{ACTOR}.megatron.{EP}=3"], f"{ACTOR}.megatron.{EP}", "tensor 1 x expert 3 x pipeline 1 = 3 does not"),
        (
            [f"{ACTOR}.megatron.{TP}=4", f"{ACTOR}.megatron.{EP}=4"],
            f"{ACTOR}.megatron.{EP}",
            "expert tensor 4 x expert 4 x pipeline 1 = 16 does not divide the world of 8 ranks",
        ),
        ([f"{ACTOR}.megatron.{VPP}=2"], f"{ACTOR}.megatron.{VPP}", "only if pipeline_model_parallel_size > 1"),
        ([f"{ACTOR}.megatron.{VPP}=1"], f"{ACTOR}.megatron.{VPP}", "greater than or equal to 2"),
        (
            [f"{ACTOR}.megatron.{PP}=2", f"{ACTOR}.megatron.{VPP}=2"],
            f"{ACTOR}.megatron.{VPP}",
            "2 does not divide the 3 layers that a stage has",
        ),
        ([f"{ACTOR}.megatron.{PP}=4", f"{FIRST}=1"], OVERRIDE, "leave 5 of the 6 layers"),
        ([f"{ACTOR}.megatron.{PP}=2", f"{FIRST}=1", f"{LAST}=4"], OVERRIDE, "leave 1 of the 6 layers"),
        ([f"{ACTOR}.megatron.{PP}=4", f"{FIRST}=5"], OVERRIDE, "for 3 stages"),
        ([f"{ACTOR}.megatron.{PP}=2", f"{FIRST}=0"], OVERRIDE, "0 is not a number of layers"),
        ([f"{FIRST}=6"], OVERRIDE, "no meaning with pipeline_model_parallel_size=1"),
        ([f"{OVERRIDE}.{CP}=2"], OVERRIDE, f"write {ACTOR}.megatron.{CP}"),
        ([f"{OVERRIDE}.pipeline_model_parallel_layout=Et|t"], OVERRIDE, "is not understood"),
        (
            [f"{ACTOR}.megatron.param_offload=true", f"{ACTOR}.megatron.use_distributed_optimizer=false"],
            f"{ACTOR}.megatron.param_offload",
            "write use_distributed_optimizer=true",
        ),
        (
            ["critic.megatron.param_offload=true", f"{ACTOR}.megatron.use_distributed_optimizer=false"],
            "critic.megatron.param_offload",
            "write use_distributed_optimizer=true",
        ),
        (["data.train_batch_size=100"], f"{ACTOR}.ppo_mini_batch_size", "more than data.train_batch_size=100"),
        (["data.train_batch_size=300"], f"{ACTOR}.ppo_mini_batch_size", "train_batch_size=256 or 512"),
        (["critic.ppo_mini_batch_size=96"], "critic.ppo_mini_batch_size", "96 does not divide"),
        ([f"{ACTOR}.ppo_mini_batch_size=4"], f"{ACTOR}.ppo_mini_batch_size", "fewer sequences than the 8"),
        (["data.max_response_length=1600"], "data.max_response_length", "2112 tokens, but"),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=1000"], f"{ACTOR}.ppo_max_token_len_per_gpu", "write at least 1024"),
        (
            ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1000"],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            "write at least 1024",
        ),
        ([f"{ROLLOUT}.prompt_length=100"], f"{ROLLOUT}.prompt_length", "less than data.max_prompt_length=512"),
        ([f"{ROLLOUT}.response_length=600"], f"{ROLLOUT}.response_length", "more than data.max_response_length=512"),
        ([f"{ROLLOUT}.max_num_seqs=9000"], f"{ROLLOUT}.max_num_batched_tokens", "cannot serve"),
        (["algorithm.adv_estimator=grpo"], f"{ROLLOUT}.n", "write n=2 or more"),
        (["algorithm.adv_estimator=rloo"], f"{ROLLOUT}.n", "adv_estimator=rloo compares the responses"),
        (["algorithm.adv_estimator=opo", f"{ROLLOUT}.do_sample=false"], f"{ROLLOUT}.do_sample", "write true"),
        (["algorithm.filter_groups.enable=true"], f"{ROLLOUT}.n", "algorithm.filter_groups compares the responses"),
        (
            ["algorithm.filter_groups.enable=true", f"{ROLLOUT}.n=2", f"{ROLLOUT}.do_sample=false"],
            f"{ROLLOUT}.do_sample",
            "algorithm.filter_groups compares them: write true",
        ),
        (
            ["algorithm.filter_groups={enable: true, metric: seq_final_reward}", f"{ROLLOUT}.n=2"],
            "algorithm.filter_groups.metric",
            "write seq_reward",
        ),
        (
            ["algorithm.adv_estimator=remax", f"{ROLLOUT}.do_sample=false"],
            f"{ROLLOUT}.do_sample",
            "with the greedy one",
        ),
        (
            ["algorithm.adv_estimator=reinforce_plus_plus", "trainer.critic_warmup=2"],
            "trainer.critic_warmup",
            "reinforce_plus_plus has no critic to warm up",
        ),
        (["algorithm.overlong_buffer.enable=true"], "algorithm.overlong_buffer.len", "0 is not a part of the 512"),
        (
            ["algorithm.overlong_buffer.enable=true", "algorithm.overlong_buffer.len=600"],
            "algorithm.overlong_buffer.len",
            "600 is not a part of the 512 tokens",
        ),
        (
            ["algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.calculate_log_probs=false"],
            f"{ROLLOUT}.calculate_log_probs",
            "write true",
        ),
        *(
            ([f"algorithm.rollout_correction.{way}=token", f"{ROLLOUT}.{key}={value}"], f"{ROLLOUT}.{key}", "write ")
            for way in ("rollout_is", "rollout_rs")
            for key, value in (("top_p", 0.9), ("top_k", 50), ("do_sample", "false"))
        ),
        (["environment.path=own.py"], "environment.name", "environment.path=own.py defines a class: write its name"),
        (
            ["environment.name=chess"],
            "environment.name",
            "'chess' is not built in (openenv, python, ",
        ),
        (
            ["environment.name=openenv", "environment.timeout_s=1800"],
            "environment.timeout_s",
            "1800 s for one turn reach trainer.phase_timeout_s=1800",
        ),
        (
            ["environment.name=openenv", "custom_reward_function.path=mine.py"],
            "custom_reward_function.path",
            "environment.name=openenv gives the rewards, turn by turn",
        ),
        (
            ["environment.name=openenv", "algorithm.overlong_buffer.enable=true"],
            "algorithm.overlong_buffer.enable",
            "environment.name=openenv gives the rewards, turn by turn",
        ),
        (
            ["environment.name=python"],
            "environment.run_code",
            "they may read, write and send what the user of this run may",
        ),
        (
            ["environment.name=openenv", f"{ROLLOUT}.ignore_eos=true"],
            f"{ROLLOUT}.ignore_eos",
            "a turn ends at the end-of-sequence token",
        ),
        (
            ["environment.name=openenv", "algorithm.adv_estimator=remax"],
            "algorithm.adv_estimator",
            "one greedy response, which is no episode",
        ),
        (
            [f"{ROLLOUT}.keep_complete=true", "environment.name=openenv"],
            f"{ROLLOUT}.keep_complete",
            "by counted engine",
        ),
        (["algorithm.adv_estimator=none"], "algorithm.adv_estimator", "the actor would learn nothing"),
        (
            [f"{ROLLOUT}.partial.enable=true"],
            "algorithm.rollout_correction.rollout_is",
            "learns from tokens of older weights, which only a correction makes up for: write token, or bypass_mode",
        ),
        (
            ["algorithm.rollout_correction={rollout_is: token, bypass_mode: true}"],
            "algorithm.rollout_correction.rollout_is",
            "would correct twice",
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=true", f"{ROLLOUT}.top_k=5"],
            f"{ROLLOUT}.top_k",
            "leave out rollout_is, rollout_rs and bypass_mode",
        ),
        (
            [
                *("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "algorithm.filter_groups.enable=true"),
                *(f"{ROLLOUT}.partial.enable=true", "algorithm.rollout_correction.rollout_is=token"),
            ],
            f"{ROLLOUT}.partial.enable",
            "use one of the two",
        ),
        (
            ["algorithm.rollout_correction.rollout_rs=token", "algorithm.rollout_correction.rollout_rs_threshold=0.5"],
            "algorithm.rollout_correction.rollout_rs_threshold",
            "no ratio lies between 2 and 0.5",
        ),
        (
            [
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold_lower=2.5",
            ],
            "algorithm.rollout_correction.rollout_is_threshold_lower",
            "no weight lies between 2.5 and 2",
        ),
        *(
            (
                [f"algorithm.rollout_correction.{key}=token", "algorithm.rollout_correction.rollout_is_threshold=null"],
                "algorithm.rollout_correction.rollout_is_threshold",
                "null is no bound",
            )
            for key in ("rollout_is", "rollout_rs")
        ),
        (
            [f"{ACTOR}.ptx_coef=0.5"],
            f"{ACTOR}.ptx_files",
            "ptx_coef=0.5 needs supervised pairs",
        ),
        (
            [f"{ACTOR}.ptx_batch_size=8"],
            f"{ACTOR}.ptx_files",
            "ptx_batch_size=8 needs supervised pairs",
        ),
        (
            [f"{ACTOR}.ptx_files=[]", f"{ACTOR}.ptx_coef=0.5"],
            f"{ACTOR}.ptx_files",
            "name their parquet files",
        ),
        (
            [f"{ACTOR}.ptx_files=/nowhere/pairs.parquet", f"{ACTOR}.ptx_coef=0.5"],
            f"{ACTOR}.ptx_files",
            "no such file: /nowhere/pairs.parquet",
        ),
        (
            [f"{ACTOR}.ptx_files=s3://bucket/pairs.parquet"],
            f"{ACTOR}.ptx_coef",
            "have no weight: write more than 0",
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=6"],
            f"{ACTOR}.policy_loss.clip_cov_lb",
            "between 6 and clip_cov_ub=5",
        ),
        (["critic.model.path="], "critic.model.path", "should be a valid string"),
        (["critic.model.path=''"], "critic.model.path", "gae trains a critic"),
        (["critic.model.tokenizer_path=/none"], "critic.model.tokenizer_path", "give a directory"),
        (["trainer.test_freq=5"], "data.val_files", "trainer.test_freq=5 needs validation prompts"),
        ([f"{ROLLOUT}.val_kwargs.n=4"], f"{ROLLOUT}.val_kwargs.do_sample", "the 4 greedy responses"),
        (
            [f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.do_sample=true"],
            f"{ROLLOUT}.val_kwargs.temperature",
            "write 1.0, or n=1",
        ),
        (["trainer.rollout_data_dir=s3://bucket/rollouts"], "trainer.rollout_data_dir", "must be a directory"),
        (["trainer.default_local_dir=s3://bucket/run"], "trainer.default_local_dir", "must be a directory"),
        (["trainer.mlflow_tracking_uri=htp://host"], "trainer.mlflow_tracking_uri", "htp:// is no scheme of MLflow's"),
        (["data.val_files=s4://bucket/a.parquet"], "data.val_files", "neither pyarrow nor fsspec opens s4://"),
        (["data.val_files=[zip://a::s4://b]"], "data.val_files", "neither pyarrow nor fsspec opens s4://"),
        (
            [f"{ACTOR}.ptx_files=s4://b/a", f"{ACTOR}.ptx_coef=1"],
            f"{ACTOR}.ptx_files",
            "neither pyarrow nor fsspec opens s4://",
        ),
        (["custom_reward_function.path=s3://b/r.py"], "custom_reward_function.path", "no such file: s3://b/r.py"),
        (["trainer.val_only=true"], "data.val_files", "trainer.val_only=true needs validation prompts"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path", "is None"),
        (["trainer.resume_from_path=here"], "trainer.resume_from_path", "with trainer.resume_mode=auto"),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere://global_step_1"],
            "trainer.resume_from_path",
            "neither pyarrow nor fsspec opens nowhere://",
        ),
        (
            ["trainer.default_hdfs_dir=nowhere://x"],
            "trainer.default_hdfs_dir",
            "neither pyarrow nor fsspec opens nowhere://",
        ),
        (["trainer.default_hdfs_dir=''"], "trainer.default_hdfs_dir", "is empty"),
        (
            ["trainer.default_local_dir=run", "trainer.default_hdfs_dir=./run"],
            "trainer.default_hdfs_dir",
            "./run is trainer.default_local_dir itself",
        ),
        (
            ["trainer.default_local_dir=/tmp/run#2", "trainer.default_hdfs_dir=file://localhost/tmp/./x/../run#2/"],
            "trainer.default_hdfs_dir",
            "run#2/ is trainer.default_local_dir itself",
        ),
        (["trainer.default_hdfs_dir=file://mirror"], "trainer.default_hdfs_dir", "has three slashes"),
        (["data.val_files=nothere.parquet"], "data.val_files", "no such file: nothere.parquet"),
        (["data.train_files=[]"], "data.train_files", "is empty"),
        (["data.max_prompt_id_length=8"], "data.max_prompt_id_length", "set data.prompt_id_key"),
        (["data.tokenizer=./nothere"], "data.tokenizer", "no such file"),
        (["custom_reward_function.path=nothere.py"], "custom_reward_function.path", "no such file"),
        (
            ["custom_reward_function.path=examples/rewards/sentiment.py", "custom_reward_function.name=goood"],
            "custom_reward_function.name",
            "has no function 'goood'; it has ",
        ),
        (["reward_model.timeout_s=1800"], "reward_model.timeout_s", "1800 s for one response reach"),
        (["reward_model.weights={}"], "reward_model.weights", "is empty"),
        (
            ["reward_model.weights.maths=1"],
            "reward_model.weights",
            "no rule 'maths': choose from data_source, custom, judge, countdown, ",
        ),
        (["reward_model.weights.custom=1"], "reward_model.weights", "what custom_reward_function.path names: set it"),
        (["reward_model.weights.judge=1"], "reward_model.weights", "what reward_model.judge.url names: set it"),
        (
            [
                "custom_reward_function.path=examples/rewards/sentiment.py",
                "custom_reward_function.reward_kwargs={depth: 3}",
            ],
            "custom_reward_function.name",
            "does not accept depth as a keyword",
        ),
        (
            ["reward_model.weights.math=1", "custom_reward_function.path=pyproject.toml"],
            "reward_model.weights",
            "leaves out custom, so that pyproject.toml is never called",
        ),
        (["actor_rollout_ref.model.path=/no/where"], "actor_rollout_ref.model.path", "no directory /no/where"),
        (
            ["critic.optim.total_training_steps=5", "critic.optim.lr_warmup_steps=6"],
            "critic.optim.lr_warmup_steps",
            "6 steps of warm-up exceed",
        ),
    ],
)
def test_impossible_combination_is_named_with_remedy(
    argv: list[str], arguments: list[str], key: str, message: str
) -> None:
    assert message in faults(argv, *arguments)[key]


def test_missing_tracker_package_is_named_with_its_extra(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.config.shared_rules.find_spec", lambda name: None)
    asked = "trainer.logger=[console,wandb]"
    assert faults(argv, asked) == {
        "trainer.logger": "the package wandb is not installed: pip install 'megarl[wandb]', or leave wandb out"
    }
    assert faults(argv) == {}
    load_config([*argv, asked], world_size=None, check_paths=False)  # as a plan for another machine reads it


def test_dynamic_sampling_by_reward_forbids_kl_in_reward(argv: list[str]) -> None:
    sampling = ["algorithm.filter_groups={enable: true, metric: seq_final_reward}", f"{ROLLOUT}.n=2"]
    for elsewhere in (f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef=0"):
        assert faults(argv, *sampling, elsewhere) == {}
    assert faults(argv, *sampling, f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true").keys() == {
        "algorithm.filter_groups.metric"
    }


@pytest.mark.parametrize(
    "arguments",
    [
        [f"{ACTOR}.megatron.{PP}=4", f"{FIRST}=1", f"{LAST}=1"],  # 1 + 2 + 2 + 1
        [f"{ACTOR}.megatron.{PP}=2", f"{FIRST}=2", f"{ACTOR}.megatron.{VPP}=2"],  # chunks of 1 and of 2 layers
        [f"{ACTOR}.megatron.{CP}=2", f"{ACTOR}.ppo_max_token_len_per_gpu=512"],  # 1024 tokens on two ranks
    ],
)
def test_uneven_stages_chunks_and_context_parallelism_are_allowed(argv: list[str], arguments: list[str]) -> None:
    assert faults(argv, *arguments) == {}


def test_inference_only_model_may_offload_under_any_optimizer(argv: list[str]) -> None:
    plain = f"{ACTOR}.megatron.use_distributed_optimizer=false"
    assert faults(argv, plain, "actor_rollout_ref.ref.megatron.param_offload=true") == {}
    followed = faults(argv, plain, f"{ACTOR}.megatron.param_offload=true")
    assert followed.keys() == {f"{ACTOR}.megatron.param_offload"}  # critic and reference follow it


def test_tensor_parallelism_must_divide_policy_and_critic_heads(argv: list[str], tmp_path: Path) -> None:
    critic = make_model(tmp_path / "critic", num_attention_heads=6, num_key_value_heads=3)
    found = faults(argv, f"critic.model.path={critic}", f"{ACTOR}.megatron.{TP}=4")
    assert list(found) == [f"{ACTOR}.megatron.{TP}"]
    heads, key_value_heads = found[f"{ACTOR}.megatron.{TP}"].splitlines()
    assert heads == "4 does not divide the 6 attention heads of critic.model.path: choose one of 1, 2, 3, 6"
    assert key_value_heads.startswith("4 and the 3 key-value heads of critic.model.path do not divide one another")


def test_key_value_heads_may_be_fewer_than_ranks(argv: list[str], tmp_path: Path) -> None:
    model = make_model(tmp_path / "wide", num_attention_heads=16, num_key_value_heads=2, head_dim=4)
    paths = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
    assert faults(argv, *paths, f"{ACTOR}.megatron.{TP}=8", f"{ROLLOUT}.{TP}=8") == {}


def test_override_config_counts(argv: list[str]) -> None:
    layers = "actor_rollout_ref.model.override_config.num_hidden_layers=4"
    assert faults(argv, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", layers, f"{ACTOR}.megatron.{PP}=4") == {}


def test_the_launcher_must_agree(argv: list[str]) -> None:
    assert "started 2 processes" in faults(argv, world_size=2)["trainer.n_gpus_per_node"]


def test_a_group_keeps_a_small_mini_batch_busy(argv: list[str]) -> None:
    assert faults(argv, f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=2") == {}


def test_fixed_micro_batches_need_size_for_each_learner(argv: list[str]) -> None:
    fixed, grpo = f"{ACTOR}.use_dynamic_bsz=false", ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]
    assert faults(argv, fixed).keys() == {f"{ACTOR}.ppo_micro_batch_size", "critic.ppo_micro_batch_size"}
    assert faults(argv, fixed, *grpo).keys() == {f"{ACTOR}.ppo_micro_batch_size"}
    small_budget = f"{ACTOR}.ppo_max_token_len_per_gpu=10"
    assert faults(argv, fixed, *grpo, f"{ACTOR}.ppo_micro_batch_size=1", small_budget) == {}


def test_group_advantages_need_no_critic_but_different_responses(argv: list[str]) -> None:
    grpo = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=5", "critic.model.path=''"]
    assert faults(argv, *grpo) == {}
    found = faults(argv, *grpo, f"{ROLLOUT}.do_sample=false", "trainer.critic_warmup=3")
    assert found.keys() == {f"{ROLLOUT}.do_sample", "trainer.critic_warmup"}


def test_rules_report_together_with_name_and_type_faults(argv: list[str]) -> None:
    found = faults(argv, "data.shufle=true", "trainer.save_freq=often", f"{ACTOR}.megatron.{TP}=3", "data.val_files=x")
    assert found.keys() == {"data.shufle", "trainer.save_freq", f"{ACTOR}.megatron.{TP}", "data.val_files"}


def test_a_rule_is_silent_about_keys_in_doubt(argv: list[str]) -> None:
    misspelt = faults(argv, "data.train_batch_size=100", f"{ACTOR}.ppo_mini_bach_size=50")
    assert misspelt.keys() == {f"{ACTOR}.ppo_mini_bach_size"}
    assert faults(argv, f"{ACTOR}.megatron.{TP}=6", "trainer.n_gpus_per_node=six").keys() == {
        "trainer.n_gpus_per_node",
        f"{ACTOR}.megatron.{TP}",  # whatever the world, 6 and 4 key-value heads do not go together
    }


def test_linear_attention_limits_split_and_engine(argv: list[str], tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "head_dim": 32}
    model = make_model(tmp_path / "linear", model_type="qwen3_next", **experts, **linear)
    paths = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
    assert faults(argv, *paths, f"{ACTOR}.megatron.{TP}=2", f"{ACTOR}.megatron.sequence_parallel=true") == {}
    assert faults(argv, *paths, f"{ACTOR}.megatron.{CP}=2") == {}
    split = faults(argv, *paths, f"{ACTOR}.megatron.{TP}=2", f"{ACTOR}.megatron.{CP}=2", f"{ROLLOUT}.{TP}=4")
    assert split[f"{ACTOR}.megatron.{CP}"].startswith(
        "2 does not divide the 1 key heads that a tensor-parallel rank has"
    )
    assert "4 does not divide the 2 key heads" in split[f"{ROLLOUT}.{TP}"]
    on_cpu = faults(argv, *paths, "trainer.device=cpu", f"{ROLLOUT}.dtype=float32")
    assert "vLLM computes linear attention in bfloat16 alone" in on_cpu[f"{ROLLOUT}.dtype"]
