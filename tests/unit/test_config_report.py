"""Test the report of rank 0 before training, and the configurations in the repository."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config, load_reward_train_config, load_sft_config, to_yaml
from megarl.config.report import batch_table, custom_code, notes, unsaved
from megarl.config.root import Config

LOADERS: dict[str, Any] = {
    "sft": load_sft_config,
    "reward_": load_reward_train_config,
}  # by a part of the name; else load_config
EXAMPLES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MINIMAL = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def load(*argv: str) -> Config:
    return load_config([*MINIMAL, *argv], world_size=None, check_paths=False)


def sizes(config: Config) -> dict[str, str]:
    return {row.stage: row.size for row in batch_table(config)}


def test_code_that_is_not_ours_is_named(tmp_path: Path) -> None:
    assert custom_code(load("custom_reward_function.name=judge")) == {}
    reward = tmp_path / "mine.py"
    reward.write_text("def judge(**_): return 1\n")
    digest = subprocess.check_output(["sha256sum", reward], text=True)[:12]
    config = load(
        f"custom_reward_function.path={reward}",
        "custom_reward_function.name=judge",
        "actor_rollout_ref.model.external_lib=[ours.models, ours.tokens]",
        "critic.model.trust_remote_code=true",
    )
    assert custom_code(config) == {
        "custom_reward_function.path": f"judge of {reward} (SHA-256: {digest})",
        "actor_rollout_ref.model.external_lib": "modules ours.models, ours.tokens",
        "critic.model.trust_remote_code": "what comes with org/critic",
    }


@pytest.mark.parametrize(
    ("section", "chosen"),
    [
        ("custom_reward_function", []),
        ("environment", []),
        ("algorithm.custom_estimator", ["algorithm.adv_estimator=custom"]),
        (f"{ACTOR}.policy_loss", [f"{ACTOR}.policy_loss.loss_mode=custom"]),
    ],
)
def test_every_file_of_the_user_is_named(section: str, chosen: list[str], tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("")
    [(key, description)] = custom_code(load(f"{section}.path={own}", f"{section}.name=mine", *chosen)).items()
    assert key == f"{section}.path"
    assert description.startswith(f"mine of {own} (SHA-256: ")


def test_code_that_comes_with_tokenizers_is_named() -> None:
    trusted = [f"{model}.trust_remote_code=true" for model in ("actor_rollout_ref.model", "critic.model")]
    kwargs = f"+{ROLLOUT}.engine_kwargs"
    config = load(
        *trusted,
        "data.tokenizer=org/tokens",
        "critic.model.tokenizer_path=org/others",
        "reward_model.model={path: org/judge, trust_remote_code: true, input_tokenizer: org/input}",
        f"{kwargs}.max_lora_cls_labels=1",
    )
    assert custom_code(config) == {
        "actor_rollout_ref.model.trust_remote_code": "what comes with org/policy and org/tokens",
        "critic.model.trust_remote_code": "what comes with org/critic and org/others",
        "reward_model.model.trust_remote_code": "what comes with org/judge and org/input",
    }
    follows = load(*trusted, "critic.model.tokenizer_path=org/policy")
    assert set(custom_code(follows).values()) == {"what comes with org/policy", "what comes with org/critic"}
    model = ("data.train_files=t.parquet", "model.path=org/m", "model.trust_remote_code=true")
    supervised = load_sft_config([*model, "data.tokenizer=org/tokens"], world_size=None, check_paths=False)
    assert custom_code(supervised) == {"model.trust_remote_code": "what comes with org/m and org/tokens"}


def test_teacher_code_is_named_with_or_without_reference() -> None:
    ref = "actor_rollout_ref.ref"
    trusted = [f"{ref}.model.trust_remote_code=true", f"{ref}.model.external_lib=ours"]
    teachers = f"{ref}.teachers={{openai/gsm8k: org/maths, code: org/code, more: org/maths}}"
    assert custom_code(load(*trusted)) == {}
    assert custom_code(load(*trusted, teachers)) == {
        f"{ref}.model.trust_remote_code": "what comes with org/maths and org/code",
        f"{ref}.model.external_lib": "module ours",
    }
    found = custom_code(load(*trusted, teachers, f"{ref}.model.path=org/general"))
    assert found[f"{ref}.model.trust_remote_code"] == "what comes with org/general and org/maths and org/code"


def test_the_table_divides_a_batch_as_by_hand() -> None:
    config = load(
        "trainer.n_gpus_per_node=8",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        f"{ROLLOUT}.n=3",
        "data.train_batch_size=64",
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
        "critic.ppo_micro_batch_size=3",
        "critic.ppo_mini_batch_size=32",
    )
    # 8 ranks = tensor 2 x data 4. Actor: 16 x 3 = 48 samples, 12 a rank, 4096 // 1024 = 4 full ones at a time.
    # Critic: 32 x 3 = 96 samples, 24 a rank, 3 at a time.
    assert sizes(config) == {
        "ranks": "8",
        "engine replicas": "2",
        "prompts": "64",
        "samples": "192",
        "actor mini-batches": "4",
        "actor share of a rank": "12",
        "actor micro-batches": "<= 3",
        "critic mini-batches": "2",
        "critic share of a rank": "24",
        "critic micro-batches": "<= 8",
    }
    meanings = {row.stage: row.meaning for row in batch_table(config)}
    assert meanings["actor mini-batches"] == "16 prompts = 48 samples; x 2 epochs = 8 optimizer steps"
    assert meanings["critic mini-batches"] == "32 prompts = 96 samples; x 2 epochs = 4 optimizer steps"
    assert meanings["engine replicas"] == "tensor 4; at most 32 prompts each"


def test_table_counts_context_ranks_and_virtual_pipeline_rounds() -> None:
    config = load(
        "trainer.n_gpus_per_node=8",
        f"{ACTOR}.megatron.context_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=3",
        f"{ACTOR}.ppo_mini_batch_size=18",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
        "data.train_batch_size=36",
        "critic.ppo_mini_batch_size=36",
    )
    # 8 ranks = context 2 x pipeline 2 x data 2: 9 samples a rank, 2 x 1024 // 1024 = 2 at a time: 5, in pairs 6.
    rows = {row.stage: row for row in batch_table(config)}
    assert rows["ranks"].meaning == "trainer: tensor 1 x pipeline 2 x context 2 x data 2"
    assert rows["actor share of a rank"].size == "9"
    assert rows["actor micro-batches"].size == "<= 6"
    assert rows["actor micro-batches"].meaning.startswith("at most 2048 tokens each; 2 samples")


def test_table_shows_samples_beyond_batch() -> None:
    grouped = [f"{ROLLOUT}.n=4", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16"]
    limited = load("algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=true", *grouped)
    rows = {row.stage: row for row in batch_table(limited)}
    assert rows["generation batches"].size == "<= 10"
    assert rows["generation batches"].meaning == "of these samples, until those of 64 prompts differ in acc"
    assert rows["greedy responses"].size == "64"
    endless = load("algorithm.filter_groups={enable: true, max_num_gen_batches: 0}", *grouped)
    assert sizes(endless)["generation batches"] == "1 or more"
    assert not {"generation batches", "greedy responses"} & sizes(load(*grouped)).keys()


def test_table_shows_supervised_pairs_beyond_mini_batch() -> None:
    mixed = [f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.ptx_files=[a, b]", f"{ACTOR}.ptx_coef=1"]
    assert sizes(load(*mixed))["supervised pairs"] == "64"
    assert sizes(load(*mixed, f"{ACTOR}.ptx_batch_size=24"))["supervised pairs"] == "24"
    assert "supervised pairs" not in sizes(load())


def test_table_omits_critic_if_there_is_none() -> None:
    config = load("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=5")
    assert not [stage for stage in sizes(config) if stage.startswith("critic")]


@pytest.mark.parametrize(("budget", "number", "each"), [(400, "<= 22", 3), (100, "<= 64", 1)])
def test_reward_model_may_have_the_token_budget_alone(budget: int, number: str, each: int) -> None:
    arguments = [
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=2",
        "data.train_batch_size=32",
        "trainer.n_gpus_per_node=1",
    ]
    arguments += [
        f"{ACTOR}.ppo_mini_batch_size=32",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size=4",
    ]
    arguments += ["reward_model.enable=true", "reward_model.model.path=m", "reward_model.micro_batch_size=null"]
    arguments += [
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        f"{ACTOR}.ppo_max_token_len_per_gpu={budget}",
    ]
    (row,) = [row for row in batch_table(load(*arguments)) if row.stage == "reward model micro-batches"]
    assert (row.size, row.meaning) == (
        number,
        f"at most {budget} tokens each; {each} samples if all reach 128 tokens",
    )


def test_fixed_micro_batches_ignore_the_token_budget() -> None:
    config = load(
        "trainer.n_gpus_per_node=1",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size=32",
        "critic.ppo_micro_batch_size=64",
    )
    assert sizes(config)["actor micro-batches"] == "<= 8"
    assert sizes(config)["critic micro-batches"] == "<= 4"


@pytest.mark.parametrize(
    ("arguments", "remark"),
    [
        ([f"{ROLLOUT}.dtype=float32"], "rollout.dtype=float32 differs"),
        ([f"{ROLLOUT}.top_k=50"], "cut the distribution"),
        ([f"{ROLLOUT}.top_p=0.9"], "cut the distribution"),
        ([f"{ROLLOUT}.calculate_log_probs=false"], "calculate_log_probs is false: no step compares"),
        ([f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"], "penalised twice"),
        (
            [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k1"],
            "actor.kl_loss_type=k1 has no gradient in the mean",
        ),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "gspo weighs all sequences the same, as"),
        (["trainer.mlflow_tracking_uri=http://ann:pw@host"], "there is a secret in trainer.mlflow_tracking_uri: it is"),
        ([f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=2", "trainer.n_gpus_per_node=8"], "without work"),
    ],
)
def test_doubtful_choices_are_remarked_on(arguments: list[str], remark: str) -> None:
    (sentence,) = notes(load(*arguments))
    assert remark in sentence


def test_note_reports_steps_without_engine_comparison() -> None:
    silent, other = load(f"{ROLLOUT}.top_p=0.9"), load(f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.temperature=0.7")
    assert not any("no step compares" in sentence for sentence in notes(silent))
    assert any("at another temperature than 1" in sentence for sentence in notes(other))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trainer.save_freq=5"], []),
        ([], ["only the last step is saved, so a job that is killed repeats"]),
        (["data.val_files=a", "trainer.val_only=true"], []),
        (
            ["data.val_files=a", "trainer.test_freq=5"],
            ["only the last step and each step whose validation is the best so far is saved"],
        ),
        (["data.val_files=a", "trainer.test_freq=5", "trainer.save_best=false"], ["only the last step is saved, so"]),
        (["trainer.save_last=false"], ["no step is saved, so a job that is killed starts again", "is lost when"]),
        (["trainer.save_freq=5", "trainer.save_last=false"], ["the model of the last step is lost when the run ends"]),
    ],
)
def test_a_run_says_what_it_will_not_save(arguments: list[str], expected: list[str]) -> None:
    sentences = list(unsaved(load(*arguments)))
    assert len(sentences) == len(expected)
    assert all(part in sentence for part, sentence in zip(expected, sentences, strict=True)), sentences


def test_there_is_nothing_to_remark_on_the_defaults() -> None:
    assert list(notes(load())) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid_short_and_round_trips(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    loader = next((load for name, load in LOADERS.items() if name in path.stem), load_config)
    config = loader([str(path)], world_size=None, check_paths=False)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(config))
    assert loader([str(resolved)], world_size=None, check_paths=False) == config


def test_there_are_examples() -> None:
    assert {"ppo_countdown", "grpo_gsm8k", "ppo_megatron_8gpu"} <= {path.stem for path in EXAMPLES}
