"""Names: misspelt, misplaced, foreign, and those that other trainers use."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.config.root import LINKS, Config, RewardTrainConfig, SFTConfig, VerifyConfig
from megarl.config.schema import Schema

ROOTS = (Config, SFTConfig, RewardTrainConfig, VerifyConfig)
MINIMAL = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic")


def message_of(argument: str) -> str:
    """Return the only fault of `argument`, which must be about its key."""
    with pytest.raises(ConfigError) as caught:
        load_config([*MINIMAL, argument], world_size=None, check_paths=False)
    (fault,) = caught.value.faults
    assert fault.path == argument.partition("=")[0]
    return fault.message


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("data.train_bach_size", "data.train_batch_size"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actr.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("data.n", "actor_rollout_ref.rollout.n"),
        (
            "actor_rollout_ref.actor.tensor_model_parallel_size",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        ),
        (
            "actor_rollout_ref.rollout.tensor_parallel_size",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
        ),
        ("algorithm.kl_ctrl.coef", "algorithm.kl_ctrl.kl_coef"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("critic.clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
    ],
)
def test_misspelt_key_is_answered_with_correct_key(written: str, meant: str) -> None:
    assert message_of(f"{written}=1") == f"unknown key: did you mean {meant}?"


@pytest.mark.parametrize("leaf", [leaf for leaf in Schema.of(Config).leaves if len(leaf.rpartition(".")[2]) > 5])
def test_one_letter_too_few_is_always_understood(leaf: str) -> None:
    assert Schema.of(Config).nearest(leaf[:-1]) == leaf


def test_unfamiliar_key_is_reported_as_unknown() -> None:
    assert message_of("algorithm.nobodys.method=pow").startswith("unknown key")


@pytest.mark.parametrize(
    ("argument", "equivalent"),
    [
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=float16", "actor_rollout_ref.actor.megatron.dtype"),
        ("actor_rollout_ref.actor.strategy=other", "write megatron"),
        ("trainer.validation_data_dir=dumps", "write trainer.rollout_data_dir"),
        ("critic.strategy=other", "critic.megatron.tensor_model_parallel_size"),
        ("actor_rollout_ref.rollout.name=hf", "write vllm"),
        ("trainer.logger=[console,clearml]", "write wandb, mlflow"),
        ("reward_model.reward_manager=limit", "reward_model.weights"),
    ],
)
def test_foreign_argument_is_answered_with_our_equivalent(argument: str, equivalent: str) -> None:
    assert equivalent in message_of(argument)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("weight_decay", "did you mean actor_rollout_ref.actor.optim.weight_decay?"),
        ("policy.optimizer.kwargs.lr", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("tensor_model_parallel_size", "nothing of this name"),
        ("some.manager.name", "nothing of this name"),
        ("some.manager.enable", "nothing of this name"),
    ],
)
def test_no_hint_changes_training(name: str, meant: str) -> None:
    assert meant in message_of(f"{name}=3")


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size"),
        (
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        ),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.ref.log_prob_micro_batch_size"),
        ("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size"),
        ("critic.forward_micro_batch_size_per_gpu", "critic.forward_micro_batch_size"),
    ],
)
def test_newer_names_of_the_same_keys_are_understood(written: str, ours: str) -> None:
    by_alias = load_config([*MINIMAL, f"{written}=4"], world_size=None, check_paths=False)
    assert by_alias == load_config([*MINIMAL, f"{ours}=4"], world_size=None, check_paths=False)
    assert by_alias != load_config(MINIMAL, world_size=None, check_paths=False)


def test_alias_must_not_contradict_canonical_name(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("critic: {ppo_micro_batch_size: 4, ppo_micro_batch_size_per_gpu: 8}\n")
    with pytest.raises(ConfigError, match="given twice, as 4 and as 8"):
        load_config([*MINIMAL, str(file)], world_size=None, check_paths=False)


def sections(root: type) -> Iterator[type]:
    yield root
    for kind in get_type_hints(root).values():
        if is_dataclass(kind) and isinstance(kind, type):
            yield from sections(kind)


@pytest.mark.parametrize("kind", sorted({kind for root in ROOTS for kind in sections(root)}, key=str))
def test_sections_forbid_unknown_keys_and_document_every_key(kind: type) -> None:
    assert kind.__pydantic_config__["extra"] == "forbid"  # type: ignore[attr-defined]
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(importlib.import_module(kind.__module__))).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    own = [index for index, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    assert set(kind.__annotations__) <= {field.name for field in fields(kind)}
    for index in own:
        text = body[index + 1] if index + 1 < len(body) else None
        assert isinstance(text, ast.Expr), f"line {body[index].lineno}: a key without a docstring"
        assert isinstance(text.value, ast.Constant), f"line {body[index].lineno}: a key without a docstring"


@pytest.mark.parametrize("root", ROOTS)
def test_links_join_keys_that_exist(root: type) -> None:
    assert LINKS[root].keys() <= Schema.of(root).leaves.keys()
