"""The effect of a changed configuration on a run that resumes: every key has one, and differences are reported."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import pytest
import yaml

from megarl.checkpoint.differences import config_differences, size_differences
from megarl.config.load import load_config, to_yaml
from megarl.config.root import Config, RewardTrainConfig, SFTConfig
from megarl.config.schema import Schema
from megarl.mark import UNKNOWN, Effect
from megarl.rollout.config import SamplingSection, SyncSection
from megarl.section import section

ROOTS = (Config, SFTConfig, RewardTrainConfig)
CHANGES = {key: change for root in ROOTS for key, change in Schema.of(root).changes.items()}
MINIMAL = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "critic.model.path=model"]


def tree(*arguments: str) -> dict[str, Any]:
    """The configuration as a checkpoint keeps it."""
    config = load_config([*MINIMAL, *arguments], world_size=None, check_paths=False)
    loaded: dict[str, Any] = yaml.safe_load(to_yaml(config))
    return loaded


def effects(was: dict[str, Any], now: dict[str, Any]) -> dict[str, Effect]:
    return {found.key: found.change.effect for found in config_differences(was, now, CHANGES)}


def test_every_key_has_a_mark() -> None:
    unmarked = [key for key, change in CHANGES.items() if change is UNKNOWN]
    assert not unmarked, "say in the mark of its field what another value does to a run"


@section()
class Unmarked:
    """A section of tomorrow."""

    size: int = 1
    """Nobody has analysed it."""


def test_a_key_without_a_mark_changes_the_curve() -> None:
    assert Schema.of(Unmarked).changes == {"size": UNKNOWN} and UNKNOWN.effect is Effect.CURVE


def sections(root: type) -> Iterator[type]:
    yield root
    for kind in get_type_hints(root).values():
        if is_dataclass(kind) and isinstance(kind, type):
            yield from sections(kind)


def test_only_curve_effect_is_default_for_sections() -> None:
    """Keys that a section will have tomorrow have its mark."""
    marked = {kind: getattr(kind, "__change__") for root in ROOTS for kind in sections(root)}  # noqa: B009
    others = {kind for kind, change in marked.items() if change and change.effect is not Effect.CURVE}
    assert others == {SamplingSection, SyncSection}


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("trainer.logger", Effect.NONE),
        ("trainer.total_training_steps", Effect.NONE),
        ("actor_rollout_ref.rollout.val_kwargs.n", Effect.NONE),
        ("critic.megatron.param_offload", Effect.NONE),
        ("trainer.phase_timeout_s", Effect.NONE),
        ("trainer.device", Effect.ROUNDING),
        ("trainer.n_gpus_per_node", Effect.ROUNDING),
        ("megatron.pipeline_model_parallel_size", Effect.ROUNDING),
        ("reward_model.megatron.tensor_model_parallel_size", Effect.ROUNDING),
        ("reward_model.micro_batch_size", Effect.ROUNDING),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", Effect.ROUNDING),
        ("actor_rollout_ref.actor.megatron.dtype", Effect.CURVE),
        ("actor_rollout_ref.actor.optim.lr", Effect.CURVE),
        ("data.train_files", Effect.CURVE),
        ("data.seed", Effect.CURVE),
        ("actor_rollout_ref.rollout.temperature", Effect.CURVE),
        ("actor_rollout_ref.rollout.seed", Effect.CURVE),
        ("critic.model.path", Effect.CURVE),
        ("reward_model.timeout_s", Effect.CURVE),
    ],
)
def test_the_effect_of_a_key(key: str, effect: Effect) -> None:
    assert CHANGES[key].effect is effect


def test_the_largest_effects_come_first() -> None:
    was, now = tree(), tree("trainer.save_freq=5", "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.optim.lr=1e-5")
    found = config_differences(was, now, CHANGES)
    assert [(one.key, one.was, one.now) for one in found] == [
        ("actor_rollout_ref.actor.optim.lr", 1e-6, 1e-5),
        ("trainer.n_gpus_per_node", 8, 4),
        ("trainer.save_freq", -1, 5),
    ]
    assert effects(was, was) == {}


@pytest.mark.parametrize(
    ("optim", "effect"),
    [
        ([], Effect.NONE),
        (["warmup_style=cosine"], Effect.CURVE),
        (["lr_warmup_steps_ratio=0.1"], Effect.CURVE),
        (["lr_warmup_steps_ratio=0.1", "lr_warmup_steps=3"], Effect.NONE),
        (["warmup_style=cosine", "total_training_steps=9"], Effect.NONE),
    ],
)
def test_longer_run_changes_curve_if_learning_rate_depends(optim: list[str], effect: Effect) -> None:
    schedule = [f"critic.optim.{setting}" for setting in optim]
    was, now = (tree(*schedule, f"trainer.total_training_steps={steps}") for steps in (6, 9))
    assert effects(was, now) == {"trainer.total_training_steps": effect}


@pytest.mark.parametrize("key", ["total_training_steps", "lr_warmup_steps_ratio"])
def test_null_in_a_kept_file_is_no_number(key: str) -> None:
    was, now = (tree(f"trainer.total_training_steps={steps}") for steps in (6, 9))
    was["critic"]["optim"][key] = None
    assert effects(was, now)["trainer.total_training_steps"] is Effect.NONE


def test_a_key_of_another_version_is_skipped() -> None:
    was = tree()
    del was["trainer"]["phase_timeout_s"]
    was["trainer"]["of_yesterday"] = 1
    assert effects(was, tree()) == {}


def test_models_of_different_sizes_are_named() -> None:
    was = {"actor": {"hidden_size": 64, "vocab_size": 500}, "critic": {"hidden_size": 64}}
    assert size_differences(was, {"actor": {"hidden_size": 64, "vocab_size": 500}}) == {}
    assert size_differences(was, {"actor": {"hidden_size": 64, "vocab_size": 512}, "reward_model": {}}) == {
        "actor": ["vocab_size is 500 in the checkpoint and 512 here"],
        "reward_model": ["the checkpoint has no such model"],
    }
