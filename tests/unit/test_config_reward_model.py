"""Test the configuration of a run with a neural reward model."""

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.report import batch_table
from tests.support.configs import ACTOR, TP, faults, make_model, sound_arguments

REWARD = "reward_model"
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}


@pytest.fixture
def enabled(tmp_path: Path) -> list[str]:
    """Sound arguments with a reward model of four heads."""
    model = make_model(tmp_path / "reward", **CLASSIFIER, num_attention_heads=4)
    return [*sound_arguments(tmp_path), f"{REWARD}.enable=true", f"{REWARD}.model.path={model}"]


def test_reward_model_follows_actor_and_reads_policy_tokens(enabled: list[str], tmp_path: Path) -> None:
    config = load_config([*enabled, f"{ACTOR}.megatron.{TP}=2", f"{REWARD}.megatron.dtype=float32"], world_size=None)
    section = config.reward_model
    assert section.megatron.tensor_model_parallel_size == 2
    assert (section.megatron.dtype, config.actor_rollout_ref.actor.megatron.dtype) == ("float32", "bfloat16")
    assert section.model.input_tokenizer == f"{tmp_path}/model"
    passes = load_config([*enabled, f"{REWARD}.model.input_tokenizer=null"], world_size=None)
    assert passes.reward_model.model.input_tokenizer is None
    [row] = [row for row in batch_table(config) if row.stage.startswith("reward model")]
    # 1024 samples over 4 data-parallel ranks, 16 of 1024 tokens in each budget
    assert (row.stage, row.size) == ("reward model micro-batches", "<= 16")


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ([f"{REWARD}.model.path="], "model.path", "enable=true needs one"),
        ([f"{REWARD}.model.path=/nothere"], "model.path", "no directory"),
        ([f"{REWARD}.model.input_tokenizer=/nothere.model"], "model.input_tokenizer", "no such file"),
        ([f"{REWARD}.enable=false", f"{REWARD}.weights={{model: 1.0}}"], "weights", "there is none: set"),
        ([f"{REWARD}.weights={{format: 1.0}}"], "weights", "add model: 1.0"),
        ([f"{REWARD}.max_length=4096"], "max_length", "knows 2048 positions"),
        ([f"{REWARD}.megatron.{TP}=2"], f"megatron.{TP}", "leave it out, and it follows the actor's"),
        ([f"{REWARD}.strategy=other"], "strategy", "partitioned by Megatron-Core"),
        ([f"{REWARD}.rollout.name=vllm"], "rollout.name", "no engine has it"),
        ([f"{REWARD}.modle.path=x"], "modle.path", "did you mean reward_model.model.path?"),
    ],
)
def test_faults_with_their_remedies(enabled: list[str], changes: list[str], key: str, message: str) -> None:
    found = faults(enabled, *changes)
    assert list(found) == [f"{REWARD}.{key}"]
    assert message in found[f"{REWARD}.{key}"]


def test_custom_function_beside_reward_model_needs_weight(enabled: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def compute_score(**_): return 1.0\n")
    custom = f"custom_reward_function.path={tmp_path}/own.py"
    assert "custom: 0.5" in faults(enabled, custom)[f"{REWARD}.weights"]
    assert not faults(enabled, custom, f"{REWARD}.weights={{model: 1.0, custom: 0.5}}")


def test_language_models_cannot_score_and_classifiers_cannot_sample(enabled: list[str], tmp_path: Path) -> None:
    language_model = faults(enabled, f"{REWARD}.model.path={tmp_path}/model")
    assert "is a language model and no sequence classifier" in language_model[f"{REWARD}.model.path"]
    classifier = faults(enabled, f"actor_rollout_ref.model.path={tmp_path}/reward")
    assert "predicts no tokens" in classifier["actor_rollout_ref.model.path"]
    two = make_model(tmp_path / "two", **CLASSIFIER)
    (two / "config.json").write_text((two / "config.json").read_text().replace('"num_labels": 1', '"num_labels": 2'))
    assert "num_labels 2" in faults(enabled, f"{REWARD}.model.path={two}")[f"{REWARD}.model.path"]


def test_the_mesh_must_divide_it_too(enabled: list[str]) -> None:
    found = faults(enabled, f"{ACTOR}.megatron.{TP}=8", "actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    assert "8 does not divide the 4 attention heads of reward_model.model.path" in found[f"{ACTOR}.megatron.{TP}"]
    assert not faults(enabled, f"{ACTOR}.megatron.{TP}=4")
