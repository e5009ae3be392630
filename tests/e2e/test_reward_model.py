"""A run that learns from a neural reward model and a rule together, both in training and in validation."""

from pathlib import Path

import pytest

from megarl.commands import train
from megarl.tracking.jsonl import read_jsonl
from tests.support.forked import run_job
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_classifier
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_grpo_trains_on_weighted_model_and_rule_scores(workspace: Workspace, tmp_path: Path) -> None:
    model = write_classifier(tmp_path / "reward", "qwen2", vocab_size=150)  # another family, with another vocabulary
    train_sentencepiece(model / "tokenizer.model", vocab_size=120, model_type="unigram")
    run_dir = tmp_path / "run"
    run_job(
        *(2, train.main, *train_arguments(workspace, run_dir)),
        "reward_model.enable=true",
        f"reward_model.model.path={model}",
        "reward_model.micro_batch_size=3",
        "reward_model.max_length=40",
        "reward_model.weights={model: 0.5, custom: 2.0}",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.val_before_train=false",
        "trainer.test_freq=1",
        "trainer.total_training_steps=1",
        log=tmp_path / "train",
        timeout_s=300,
    )
    [step] = read_jsonl(run_dir / "metrics.jsonl")
    assert step["reward/model/min"] < step["reward/model/mean"] < step["reward/model/max"]
    expected = 0.5 * step["reward/model/mean"] + 2.0 * step["reward/custom/mean"]
    assert step["critic/score/mean"] == pytest.approx(expected, abs=1e-5)
    rows = read_jsonl(run_dir / "val_generations.jsonl")
    digits = [sum(map(str.isdigit, row["response"])) / 10 for row in rows]
    assert len({round(row["score"] - 2.0 * rule, 6) for row, rule in zip(rows, digits, strict=True)}) > 1
