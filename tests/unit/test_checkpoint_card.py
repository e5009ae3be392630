"""The model card: its front matter is what the hub reads, its numbers are those of the exported step."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.checkpoint.card import card, loading, training
from megarl.checkpoint.contents import Contents
from megarl.checkpoint.state import State

RL = {
    "data": {"train_files": ["a.parquet", "b.parquet"], "val_files": "c.parquet"},
    "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-3B"}},
    "algorithm": {"adv_estimator": "grpo"},
    "custom_reward_function": {"path": "mine.py"},
}
HISTORY = [
    {"step": 0, "val/test_score/mine": 0.1},
    {"step": 2, "critic/score/mean": 0.25, "val/test_score/mine": 0.5},
    {"step": 3, "critic/score/mean": 0.75},
]


def contents(config: dict[str, Any] | None) -> Contents:
    parts = {"code": None, "inputs": None, "versions": {"torch": "2.13"}, "models": None, "run_ids": {}}
    return Contents(state=State(step=2), config=config, **parts)


def test_the_card_of_a_policy(tmp_path: Path) -> None:
    text = card(contents(RL), HISTORY, tmp_path / "actor", scores=False)
    front, body = text.split("---\n")[1:3]
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megarl", "reinforcement-learning"],
        "base_model": "Qwen/Qwen2.5-3B",
    }
    assert (
        "Trained from `Qwen/Qwen2.5-3B` for 2 steps. "
        "Reinforcement learning (`adv_estimator: grpo`); the reward is that of `mine.py`."
    ) in body
    assert "| validation, mine | 0.1 | 0.5 |" in body
    assert "| critic/score/mean | 0.25 | 0.25 |" in body  # step 3 is later
    assert "| data.train_files | `a.parquet`, `b.parquet` |" in body
    assert "| torch | 2.13 |" in body
    assert yaml.safe_load(body.split("```yaml\n")[1].split("```")[0]) == RL


def test_local_model_is_not_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    config = {"model": {"path": "runs/model"}}
    assert "base_model" not in card(contents(config), [], tmp_path, scores=False)
    assert "an unknown model" in card(contents(None), [], tmp_path, scores=False)


def test_the_way_of_training_is_named() -> None:
    assert training({"model": {}}) == "Supervised fine-tuning."
    assert training({"center_rewards_coefficient": 0.0}) == "It is a reward model."
    judged = RL | {"custom_reward_function": {"path": None}, "reward_model": {"enable": True}}
    assert training(judged).endswith("the reward is that of a reward model.")
    for environment in ({"name": "guess"}, {"path": "guess.py", "name": "Guess"}):
        assert training(RL | {"environment": environment}).rsplit("`")[-2] in ("guess", "guess.py")


def test_the_lines_that_load_it_are_python(tmp_path: Path) -> None:
    for scores in (False, True):
        compile(loading(tmp_path, scores=scores), "card", "exec")
    assert "vllm" not in loading(tmp_path, scores=True)
