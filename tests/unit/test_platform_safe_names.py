"""Names in the stores of trackers: accepted by the store, and never the same for different names."""

import math
import re
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name, _validate_param_name

from megarl.platform.safe_names import file_name, mlflow_key, mlflow_title, tensorboard_tag, wandb_key, wandb_project

ALPHABET = st.characters(codec=None) | st.sampled_from("a@_/. :-\ud800\x00\n")
NAMES = st.text(ALPHABET, max_size=400)
RULES = [file_name, mlflow_key, mlflow_title, tensorboard_tag, wandb_key, wandb_project]


def near(name: str) -> set[str]:
    """Return names that a careless rule takes for `name`."""
    rules = {rule(name) for rule in RULES}
    return {name, *rules, name + " ", name + "x", name.replace("@", "_at_"), name.replace("_at_", "@"), f"{name}/."}


@given(NAMES, NAMES)
@example("mean@4", "mean_at_4")
@example("a_at@", "a@at_")
@example("數" * 300, "數" * 301)
@example("..b", "_b")
@example("a\x00", "a\n")
@example("\ud800", "\udc00")
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("rule", RULES)
def test_different_names_stay_different(rule: object, one: str, other: str) -> None:
    assert callable(rule)
    for left, right in combinations(sorted(near(one) | near(other)), 2):
        assert rule(left) != rule(right), (left, right)


@given(NAMES)
@example("..b")
@example("...")
@example("\ud800")
@example("\x00a")
@settings(max_examples=500, deadline=None)
def test_every_name_is_accepted(name: str) -> None:
    key = mlflow_key(name)
    _validate_metric_name(key)
    _validate_param_name(key)
    assert key.isascii() and len(key) <= MAX_ENTITY_KEY_LENGTH
    assert max(map(len, key.split("/"))) <= 250 and not key.endswith(" ")
    assert mlflow_title(name).strip() and len(mlflow_title(name)) <= 250
    project = wandb_project(name)
    assert 0 < len(project) <= 128 and not set("/\\#?%:") & set(project)
    assert not wandb_key(name).startswith("_")
    assert re.fullmatch(r"[A-Za-z0-9_+=,-][A-Za-z0-9_.+=,-]{0,119}", file_name(name))
    for rule in RULES:
        assert not any(letter < " " for letter in rule(name).encode().decode())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("val-core/openai/gsm8k/acc/mean@4", "val-core/openai/gsm8k/acc/mean_at_4"),
        ("trainer.n_gpus_per_node", "trainer.n_gpus_per_node"),
        ("actor/pg_loss", "actor/pg_loss"),
    ],
)
def test_ordinary_names_stay_readable(name: str, key: str) -> None:
    assert mlflow_key(name) == key
    assert {rule(name) for rule in (mlflow_title, tensorboard_tag, wandb_key)} == {name}


def test_a_name_that_is_changed_begins_readably() -> None:
    assert mlflow_key("reward (é)%").startswith("reward ____-")
    assert mlflow_key("val/test_score/../../x//./y.z/").startswith("val/test_score/_/_/x/_/_/y.z/_-")
    assert math.isclose(len(mlflow_key("x" * 272)), 250)
